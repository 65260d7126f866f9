"""A folder of safetensors as strictly checked arrays. Knows formats, not architectures.

A family asks for each tensor by name and shape; what is missing, misshapen or left over at the end
is an error that names it. MLX sees a file only after its header was checked (safetensors.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from ..errors import CheckpointError, InvalidRequestError
from ..layers.embedding import Embedding, QuantizedEmbedding
from ..layers.linear import Linear, Projection, QuantizedLinear
from ..layers.moe import ExpertLinear, QuantizedExpertLinear
from .files import read_headers
from .fuse import fuse
from .quantization import QuantFormat, Quantization

Rename = Callable[[str], str | None]
Matrix = Linear | QuantizedLinear
ExpertMatrix = ExpertLinear | QuantizedExpertLinear

_FLOATS = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}
_DTYPES = {name: dtype for dtype, name in _FLOATS.items()}


class Weights:
    """The tensors of one checkpoint, taken one by one."""

    def __init__(
        self,
        tensors: dict[str, mx.array],
        *,
        quantization: Quantization | None = None,
        dtype: str = "auto",
        rename: Rename | None = None,
    ) -> None:
        self._tensors: dict[str, mx.array] = {}
        self._original: dict[str, str] = {}  # our name -> the checkpoint's
        for name, tensor in tensors.items():
            ours = rename(name) if rename else name
            if ours is None:
                continue
            if ours in self._tensors:
                raise CheckpointError(f"{self._original[ours]!r} and {name!r} are the same tensor.")
            self._tensors[ours] = tensor
            self._original[ours] = name
        self._quantization = quantization
        self.dtype = choose_dtype(self._tensors.values(), dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def raw(self, name: str, shape: Sequence[int], *, dtype: mx.Dtype | None = None) -> mx.array:
        """The tensor as it is stored; it must have this shape, and this dtype if one is given."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"Tensor {name!r} {tuple(shape)} is missing.")
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"Tensor {self._original[name]!r} has shape {tensor.shape}; expected "
                f"{tuple(shape)}."
            )
        if dtype is not None and tensor.dtype != dtype:
            raise CheckpointError(
                f"Tensor {self._original[name]!r} is {tensor.dtype}; expected {dtype}."
            )
        return tensor

    def take(self, name: str, shape: Sequence[int], *, offset: float = 0.0) -> mx.array:
        """The tensor in the activations' dtype, `offset` added before it is rounded to that."""
        tensor = self.raw(name, shape)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"Tensor {self._original[name]!r} is {tensor.dtype}; expected one of "
                f"{', '.join(_DTYPES)}."
            )
        if offset:
            tensor = tensor.astype(mx.float32) + offset
        return tensor.astype(self.dtype)

    def linear(self, path: str, out_dims: int, in_dims: int, *, bias: bool = False) -> Projection:
        """The projection at `path`, dense or quantised as the checkpoint has it."""
        return self.matrix(path, (out_dims, in_dims), bias=bias)

    def fused(
        self, paths: Sequence[str], out_dims: Sequence[int], in_dims: int, *, bias: bool = False
    ) -> Projection:
        """Projections of one input as one matrix, outputs in the order of `paths`."""
        return fuse(
            [
                self.matrix(path, (rows, in_dims), bias=bias)
                for path, rows in zip(paths, out_dims, strict=True)
            ]
        )

    def matrix(self, path: str, shape: tuple[int, int], *, bias: bool = False) -> Matrix:
        """One matrix (out_dims, in_dims), dense or quantised."""
        offset = self.take(f"{path}.bias", shape[:-1]) if bias else None
        if f"{path}.scales" in self:
            form = self.format_of(path)
            return QuantizedLinear(*self.packed(path, shape, form), offset, **asdict(form))
        return Linear(self.take(f"{path}.weight", shape), offset)

    def experts(
        self, path: str, shape: tuple[int, int, int], *, bias: bool = False
    ) -> ExpertMatrix:
        """Matrices (num_experts, out_dims, in_dims) that are stored as one tensor."""
        offset = self.take(f"{path}.bias", shape[:-1]) if bias else None
        if f"{path}.scales" in self:
            form = self.format_of(path)
            return QuantizedExpertLinear(*self.packed(path, shape, form), offset, **asdict(form))
        return ExpertLinear(self.take(f"{path}.weight", shape), offset)

    def embedding(self, path: str, shape: tuple[int, int]) -> Embedding | QuantizedEmbedding:
        """The token table (vocab_size, hidden_size)."""
        if f"{path}.scales" not in self:
            return Embedding(self.take(f"{path}.weight", shape))
        table = self.matrix(path, shape)
        assert isinstance(table, QuantizedLinear)
        return QuantizedEmbedding(table, self.dtype)

    def format_of(self, path: str) -> QuantFormat:
        """The format that the config states for a layer that has scales."""
        original = self._original[f"{path}.scales"].removesuffix(".scales")
        if self._quantization is None:
            raise CheckpointError(
                f"Tensor {original + '.scales'!r} belongs to a quantised layer, but config.json "
                "has no quantization."
            )
        return self._quantization.of(original)

    def packed(
        self, path: str, shape: tuple[int, ...], form: QuantFormat
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """weight, scales and (affine only) biases of quantised matrices (..., out, in)."""
        *rows, in_dims = shape
        if in_dims % form.group_size:
            raise CheckpointError(
                f"{path} has {in_dims} inputs, which groups of {form.group_size} do not divide."
            )
        groups = (*rows, in_dims // form.group_size)
        words = (*rows, in_dims * form.bits // 32)
        weight = self.raw(f"{path}.weight", words, dtype=mx.uint32)
        if form.mode != "affine":
            return weight, self.raw(f"{path}.scales", groups, dtype=mx.uint8), None
        return weight, self.take(f"{path}.scales", groups), self.take(f"{path}.biases", groups)

    def drop(self, *names: str) -> None:
        """Leave out tensors that are known to carry nothing."""
        for name in names:
            self._tensors.pop(name, None)

    def finish(self) -> None:
        """Raise CheckpointError if a tensor was not asked for."""
        if self._tensors:
            names = sorted(self._original[name] for name in self._tensors)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"The checkpoint has tensors that this architecture does not: "
                f"{', '.join(map(repr, names[:3]))}{more}."
            )


def load_tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a checkpoint, by name. Data is read when an array is first evaluated.

    Raises:
        CheckpointError: a file that is broken.
        ModelNotFoundError: there is none.
    """
    tensors: dict[str, mx.array] = {}
    for path, header in read_headers(folder).items():
        try:
            loaded = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        assert isinstance(loaded, dict), path
        assert loaded.keys() == header.keys(), path
        tensors.update(loaded)
    return tensors


def choose_dtype(tensors: Iterable[mx.array], dtype: str) -> mx.Dtype:
    """The dtype of activations: as asked for, or the checkpoint's own; float32 on the CPU."""
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise InvalidRequestError(
                f"dtype is {dtype!r}; expected auto, {', '.join(_DTYPES)}.", param="dtype"
            )
        return _DTYPES[dtype]
    if not mx.metal.is_available():
        return mx.float32
    votes = Counter(t.dtype for t in tensors if t.dtype in _FLOATS)
    return votes.most_common(1)[0][0] if votes else mx.float32
