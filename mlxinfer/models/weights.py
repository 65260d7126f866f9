"""Strictly checked arrays of a checkpoint, and matrices made of them.

A family takes each tensor by name and shape; one that is missing, misshapen or left over at the
end is an error that names it. Matrices that read the same input are fused, outputs side by side:
fewer operations a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from ..layers.cpu import layer_factory
from ..layers.factory import Origin
from ..layers.linear import Embedding, Projection
from ..layers.mlp import FeedForward
from ..layers.moe import MoE
from .decoder import Layer
from .language import arrays
from .matrix import StoredMatrix, combined, fused
from .quantization import QuantFormat, Quantization, format_of_shapes
from .share import Share
from .tensors import FLOATS, Tensor, begun, cast, choose_dtype, loaded, readers_of, stacked

Rename = Callable[[str], str | None]

_PARTS = ("weight", "scales", "biases")


class Weights:
    """The tensors of one checkpoint, taken one by one."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        quantization: Quantization | None = None,
        dtype: str = "auto",
        fits_float16: bool = True,
        rename: Rename | None = None,
        watch: Callable[[int, int], None] | None = None,
        adaptable: bool = False,
        many_rows: bool = False,
    ) -> None:
        self.make = layer_factory(many_rows=many_rows)
        self.make.places = [] if adaptable else None
        self.share: Share | None = None  # of the rank that takes its part; None: all is taken
        self._tensors: dict[str, Tensor] = {}
        self._original: dict[str, str] = {}  # our name -> the checkpoint's
        for name, tensor in tensors.items():
            ours = rename(name) if rename else name
            if ours is None:
                continue
            if ours in self._tensors:
                raise CheckpointError(f"{self._original[ours]!r} and {name!r} are the same tensor.")
            self._tensors[ours] = tensor
            self._original[ours] = name
        self._readers = readers_of(self._tensors.values())
        self._layer_before: list[mx.array] = []  # which may be being read
        self._watch, self._taken_bytes = watch, 0
        self._all_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._quantization = quantization
        self.dtype = choose_dtype(self._tensors, dtype, fits_float16=fits_float16)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return tuple(self._tensors[name].shape)

    def has_shape(self, name: str, shape: Sequence[int]) -> bool:
        """Whether there is a tensor of this name and shape."""
        return name in self and self.shape(name) == tuple(shape)

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        """Read and compute arrays now, so that what they were made of can be dropped."""
        self._readers.wait()
        self.compute(arrays)

    def layer(self, index: int, build: Callable[[int], Layer]) -> Layer:
        """Layer `index` of a decoder, as `build` makes it of tensors that are here.

        What it takes as it is stored is read while the next layer is built.
        """
        of_earlier, waits = self._readers.num_started, self._readers.num_waits
        with self._readers.ahead():
            layer = build(index)
        if self._readers.num_waits > waits:  # computed of what was read, which can be dropped
            self.evaluate(list(arrays(layer)))
            return layer
        self._readers.wait(of_earlier)
        layer_before, self._layer_before = self._layer_before, list(arrays(layer))
        self.compute(layer_before)
        return layer

    def compute(self, arrays: Sequence[mx.array]) -> None:
        """Compute arrays, of which all that they are made of is read."""
        mx.eval(arrays)
        if self._watch is not None:
            self._watch(self._taken_bytes, self._all_bytes)

    def raw(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: mx.Dtype | None = None,
        parts: Sequence[int] | None = None,
    ) -> mx.array:
        """The tensor as it is stored; it must have this shape, and this dtype if one is given.

        Args:
            parts: sizes of what lies side by side along the axis of the outputs; None: one thing.
        """
        return loaded(self._found(name, shape, dtype, parts))

    def _found(
        self,
        name: str,
        shape: Sequence[int],
        dtype: mx.Dtype | None = None,
        parts: Sequence[int] | None = None,
    ) -> Tensor:
        """As `raw`, and not read yet."""
        if name not in self._tensors:
            raise CheckpointError(f"Tensor {name!r} {tuple(shape)} is missing.")
        tensor = self._pop(name, shape, parts)
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"Tensor {self._original[name]!r} has shape {tensor.shape}; expected "
                f"{tuple(shape)}."
            )
        self._taken_bytes += tensor.nbytes
        if dtype is not None and tensor.dtype != dtype:
            raise CheckpointError(
                f"Tensor {self._original[name]!r} is {tensor.dtype}; expected {dtype}."
            )
        return tensor

    def _pop(self, name: str, shape: Sequence[int], parts: Sequence[int] | None) -> Tensor:
        """A tensor that is there, to be left out from now on."""
        return self._tensors.pop(name)

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        offset: float = 0.0,
        parts: Sequence[int] | None = None,
    ) -> mx.array:
        """`raw` in the activations' dtype, `offset` added before it is rounded to that."""
        tensor = self._taken(name, shape, parts)
        if offset:
            tensor = begun(tensor).astype(mx.float32) + offset
        return begun(cast(tensor, self.dtype))

    def _taken(self, name: str, shape: Sequence[int], parts: Sequence[int] | None) -> Tensor:
        """As it is stored, of any float dtype, and not read yet."""
        tensor = self._found(name, shape, parts=parts)
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"Tensor {self._original[name]!r} is {tensor.dtype}; expected one of "
                f"{', '.join(FLOATS.values())}."
            )
        return tensor

    def linear(
        self,
        path: str,
        out_dims: int,
        in_dims: int,
        *,
        bias: bool = False,
        order: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
    ) -> Projection:
        """The projection at `path`, dense or quantised as the checkpoint has it.

        Args:
            path: its name.
            out_dims, in_dims: the shape of its matrix.
            bias: whether it has one.
            order: (out_dims,) which output of the checkpoint stands where; None: as it is.
            parts: how many outputs of each kind stand side by side; None: they are of one kind.
        """
        stored = self.matrix(path, (out_dims, in_dims), bias=bias, parts=parts)
        return (stored if order is None else stored.reordered(order)).projection(self.make)

    def fused(
        self,
        paths: Sequence[str],
        out_dims: Sequence[int],
        in_dims: int,
        *,
        bias: bool = False,
        orders: Sequence[Sequence[int] | None] | None = None,
    ) -> Projection:
        """Projections of one input as one matrix, outputs in the order of `paths`.

        Args:
            paths: their names.
            out_dims: rows of each.
            in_dims: columns of all.
            bias: whether they have one.
            orders: of each one's outputs, as in `linear`; None: all as they are.
        """
        parts = []
        for path, rows, order in zip(paths, out_dims, orders or [None] * len(paths), strict=True):
            stored = self.matrix(path, (rows, in_dims), bias=bias)
            parts.append(stored if order is None else stored.reordered(order))
        return fused(parts, self.make)

    def matrix(
        self,
        path: str,
        shape: tuple[int, ...],
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> StoredMatrix:
        """One matrix (out_dims, in_dims), or (E, out_dims, in_dims); `parts` as of `linear`."""
        offset = self.take(f"{path}.bias", shape[:-1], parts=parts) if bias else None
        if f"{path}.scales" in self:
            stored = self._quantized(path, shape, offset, parts)
        else:
            weight = self._taken(f"{path}.weight", shape, parts)
            stored = StoredMatrix(self._cast(weight), offset)
        return self.named(stored, path, f"{path}.weight")

    def named(
        self, stored: StoredMatrix, path: str, tensor: str, *, outputs_axis: int = -2
    ) -> StoredMatrix:
        """A matrix with its name in the checkpoint, for adapters.

        Args:
            stored: the matrix, with all of its outputs in order.
            path: its name, as adapters have it.
            tensor: the one that it was taken from.
            outputs_axis: of that tensor, from behind.
        """
        num_rows = stored.weight.shape[-2]
        return replace(stored, origins=(Origin(path, num_rows, num_rows),))

    def _cast(self, tensor: Tensor) -> Tensor:
        """A part of a matrix in the activations' dtype."""
        return cast(tensor, self.dtype)

    def moe(self, **parts: Any) -> MoE:
        """The mixture of experts of these parts."""
        return MoE(**parts)

    def block(self, block: FeedForward) -> FeedForward:
        """A block of several summands; its matrices were taken from here."""
        return block

    def once(self, bias: mx.array) -> mx.array:
        """What is added to a sum of summands."""
        return bias

    def norm(self, path: str, dims: int, *, offset: float = 0.0) -> mx.array:
        """The weights of a norm over all of `dims` numbers; `offset` as of `take`."""
        return self.take(f"{path}.weight", (dims,), offset=offset)

    def experts(
        self,
        stack: str,
        each: str,
        shape: tuple[int, int, int],
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> StoredMatrix:
        """One matrix per expert (num_experts, out_dims, in_dims).

        Matrices that are stored one by one are stacked where they are read to.

        Args:
            stack: path of one tensor of all, as MLX checkpoints have it.
            each: path of one expert's, "{}" in place of its number, as hub checkpoints have it.
            shape: of the whole.
            bias: whether there is one; those of all experts are one tensor.
            parts: as of `linear`.

        Raises:
            CheckpointError: the experts have different formats.
        """
        count, rows, in_dims = shape
        one_by_one = any(f"{each.format(i)}.weight" in self for i in range(count))
        if not one_by_one or f"{stack}.weight" in self:
            return self.matrix(stack, shape, bias=bias, parts=parts)
        found = [self.matrix(each.format(i), (rows, in_dims), parts=parts) for i in range(count)]
        if len({one.form for one in found}) > 1:
            raise CheckpointError(f"Experts of {each!r} have different formats; expected one.")
        (origin,) = found[0].origins
        return replace(
            combined(found, lambda arrays, _: stacked(arrays)),
            bias=self.take(f"{stack}.bias", (count, rows), parts=parts) if bias else None,
            origins=(replace(origin, path=stack),),
        )

    def head(self, path: str, shape: tuple[int, int]) -> Projection:
        """The output projection (vocab_size, hidden_size)."""
        return self.linear(path, *shape)

    def embedding(self, path: str, shape: tuple[int, int], *, shared: bool) -> Embedding:
        """The token table (vocab_size, hidden_size); `shared` with the output projection."""
        return self._embedding(self.matrix(path, shape), shared)

    def _embedding(self, table: StoredMatrix, shared: bool) -> Embedding:
        if table.form is None:
            return self.make.embedding(loaded(table.weight), shared=shared)
        packed = self.make.quantized_linear(*table.packed(), **asdict(table.form))
        return self.make.quantized_embedding(packed, self.dtype)

    def _quantized(
        self,
        path: str,
        shape: tuple[int, ...],
        offset: mx.array | None,
        parts: Sequence[int] | None,
    ) -> StoredMatrix:
        *rows, in_dims = shape
        form = self._format_of(path, in_dims)
        if in_dims % form.group_size:
            raise CheckpointError(
                f"{path} has {in_dims} inputs{self._of_rank}, which groups of {form.group_size} do "
                "not divide."
            )
        words = (*rows, in_dims * form.bits // 32)
        weight = self._found(f"{path}.weight", words, mx.uint32, parts)
        groups = (*rows, in_dims // form.group_size)
        if form.mode != "affine":
            exponents = self._found(f"{path}.scales", groups, mx.uint8, parts)
            return StoredMatrix(weight, offset, exponents, None, form)
        scales, biases = (
            self._cast(self._taken(f"{path}.{name}", groups, parts))
            for name in ("scales", "biases")
        )
        return StoredMatrix(weight, offset, scales, biases, form)

    @property
    def _of_rank(self) -> str:
        """Words for messages about sizes."""
        return "" if self.share is None else f" on one of {self.share.size} ranks (use fewer)"

    def _format_of(self, path: str, in_dims: int) -> QuantFormat:
        """The format of a layer that has scales, as the config states it."""
        original = self._original[f"{path}.scales"].removesuffix(".scales")
        if self._quantization is None:
            raise CheckpointError(
                f"Tensor {original + '.scales'!r} belongs to a quantised layer, but config.json "
                "has no quantization."
            )
        scales, words = self._tensors[f"{path}.scales"], self._tensors.get(f"{path}.weight")
        fitting = None
        if words is not None and words.ndim and scales.ndim:
            integer_scales = scales.dtype == mx.uint8
            fitting = format_of_shapes(
                in_dims, words.shape[-1], scales.shape[-1], integer_scales=integer_scales
            )
        return self._quantization.of(original, fitting)

    def same_matrix(self, path: str, other: str) -> bool:
        """Whether the matrix at `path`, if there is one, is stored bit for bit as another is."""
        parts = [part for part in _PARTS if f"{path}.{part}" in self]
        return all(
            f"{other}.{part}" in self
            and bool(
                mx.array_equal(
                    loaded(self._tensors[f"{path}.{part}"]),
                    loaded(self._tensors[f"{other}.{part}"]),
                )
            )
            for part in parts
        )

    def drop_below(self, fronts: Sequence[str]) -> None:
        """Leave out all tensors with names that begin with one of these."""
        if fronts:
            self.drop(*[name for name in self._tensors if name.startswith(tuple(fronts))])

    def drop(self, *names: str) -> None:
        """Leave out tensors that are known to carry nothing."""
        for name in names:
            self._tensors.pop(name, None)

    def finish(self) -> None:
        """Wait for all reads. Raise CheckpointError if a tensor was not taken."""
        self._readers.wait()
        self.compute(self._layer_before)
        if self._tensors:
            names = sorted(self._original[name] for name in self._tensors)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"The checkpoint has tensors that this architecture does not: "
                f"{', '.join(map(repr, names[:3]))}{more}."
            )
