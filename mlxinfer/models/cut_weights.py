"""The weights of one rank: of each stored tensor the part that its config asks for, and no more.

A family asks for tensors in the sizes of its config. Where that is a rank's, they are smaller than
what is stored; which numbers they are follows from the rank's share. A matrix whose inputs were cut
gives summands: its projection sums them over the ranks.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, UnsupportedModelError
from ..layers.linear import Embedding, Projection
from ..layers.mlp import FeedForward
from ..layers.ranks import Link, SplitEmbedding, SplitHead, Summed, SummedBlock, Sums
from .matrix import StoredMatrix
from .quantization import QuantFormat, Quantization, format_of_shapes
from .safetensors import TensorInfo, read_headers
from .share import Share
from .weights import Rename, Weights

Index = tuple[slice, ...]
_DTYPES = {  # as stored: of MLX, and of numpy where that has none
    "F32": (mx.float32, "<f4"),
    "F16": (mx.float16, "<f2"),
    "BF16": (mx.bfloat16, "<u2"),
    "I64": (mx.int64, "<i8"),
    "I32": (mx.int32, "<i4"),
    "I16": (mx.int16, "<i2"),
    "I8": (mx.int8, "<i1"),
    "U64": (mx.uint64, "<u8"),
    "U32": (mx.uint32, "<u4"),
    "U16": (mx.uint16, "<u2"),
    "U8": (mx.uint8, "<u1"),
    "F8_E4M3": (mx.uint8, "<u1"),
    "F8_E5M2": (mx.uint8, "<u1"),
    "F8_E8M0": (mx.uint8, "<u1"),
    "BOOL": (mx.bool_, "?"),
}


class FileTensor:
    """A tensor in a file, of which any part can be read.

    Args:
        path: of the file.
        info: where it lies there.
        data_start: the first byte behind the file's header.
    """

    __slots__ = ("_info", "_path", "_start", "dtype", "shape")

    def __init__(self, path: Path, info: TensorInfo, data_start: int) -> None:
        if info.dtype not in _DTYPES:
            raise CheckpointError(f"{path} holds a tensor of {info.dtype}, which MLX has not.")
        self._path = path
        self._info = info
        self._start = data_start + info.start
        self.dtype = _DTYPES[info.dtype][0]
        self.shape = info.shape

    @property
    def ndim(self) -> int:
        """Of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self._info.end - self._info.start

    def read(self, index: Index) -> mx.array:
        """The numbers at these places."""
        stored = _DTYPES[self._info.dtype][1]
        if not prod(self.shape):
            return mx.zeros(self.shape, self.dtype)
        whole = np.memmap(self._path, stored, mode="r", offset=self._start, shape=self.shape)
        part = mx.array(np.ascontiguousarray(whole[index]))
        return part.view(self.dtype) if self._info.dtype == "BF16" else part


def open_tensors(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of a checkpoint, by name; errors as of `read_headers`. No data is read."""
    tensors: dict[str, FileTensor] = {}
    for path, header in read_headers(folder).items():
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        tensors |= {name: FileTensor(path, info, start) for name, info in header.items()}
    return tensors


class CutWeights(Weights):
    """Weights of a rank.

    Args:
        tensors: of the whole checkpoint.
        share: of the rank, which its config was made with.
        link: to the others.
        others: as of `Weights`.

    Attributes:
        bytes_read: from the files so far.
    """

    def __init__(
        self,
        tensors: dict[str, FileTensor],
        *,
        share: Share,
        link: Link,
        quantization: Quantization | None = None,
        dtype: str = "auto",
        fits_float16: bool = True,
        rename: Rename | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        self._files = tensors
        super().__init__(
            tensors,  # type: ignore[arg-type]  # read by `_pop` alone
            quantization=quantization,
            dtype=dtype,
            fits_float16=fits_float16,
            rename=rename,
            watch=watch,
        )
        self.share = self._share = share
        self._link = link
        self._sums = Sums(link)
        self._cut: set[str] = set()
        self._summands: set[str] = set()  # matrices whose inputs were cut
        self.bytes_read = 0

    def has_shape(self, name: str, shape: Sequence[int]) -> bool:
        """Whether there is a tensor of this name of which a part has this shape."""
        if name not in self or len(shape) != len(self.shape(name)):
            return False
        pairs = zip(self.shape(name), shape, strict=True)
        return all(self._share.cut(*pair) is not None for pair in pairs)

    def norm(self, path: str, dims: int, *, offset: float = 0.0) -> mx.array:
        """The weights of a norm over all of `dims` numbers, which this rank must have all of.

        Raises:
            UnsupportedModelError: it has a part of them.
        """
        weight = super().norm(path, dims, offset=offset)
        if f"{path}.weight" in self._cut:
            raise UnsupportedModelError(
                f"{path} is one norm over what several ranks would have: run this model with "
                "ranks=1."
            )
        return weight

    def block(self, block: FeedForward) -> FeedForward:
        """A block of several summands, with one sum over the ranks."""
        return SummedBlock(block, self._sums)

    def once(self, bias: mx.array) -> mx.array:
        """What one rank adds to a sum of summands, and the others do not."""
        return bias if self._share.rank == 0 else mx.zeros_like(bias)

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
        """As of `Weights`, summed over the ranks where each has some of the inputs."""
        projection = super().linear(path, out_dims, in_dims, bias=bias, order=order, parts=parts)
        return Summed(projection, self._sums) if path in self._summands else projection

    def matrix(
        self,
        path: str,
        shape: tuple[int, ...],
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> StoredMatrix:
        """As of `Weights`; a bias that is added to summands is that of one rank."""
        found = super().matrix(path, shape, bias=bias, parts=parts)
        if path not in self._summands or found.bias is None:
            return found
        return StoredMatrix(
            found.weight, self.once(found.bias), found.scales, found.biases, found.form
        )

    def head(self, path: str, shape: tuple[int, int]) -> Projection:
        """The output projection, of which each rank has some of the rows."""
        part = self._rows(path, shape)
        return SplitHead(part.projection(self.make), shape[0], self._link)

    def embedding(self, path: str, shape: tuple[int, int], *, shared: bool) -> Embedding:
        """The token table, of which each rank has some of the rows."""
        part = self._embedding(self._rows(path, shape), shared)
        return SplitEmbedding(part, self._num_rows(shape[0]), shape[0], self._link)

    def same_matrix(self, path: str, other: str) -> bool:
        """Whether this rank's rows of two tables are stored bit for bit alike."""
        parts = [part for part in ("weight", "scales", "biases") if f"{path}.{part}" in self]
        return all(
            f"{other}.{part}" in self
            and self.shape(f"{path}.{part}") == self.shape(f"{other}.{part}")
            and bool(
                mx.array_equal(self._own_rows(f"{path}.{part}"), self._own_rows(f"{other}.{part}"))
            )
            for part in parts
        )

    def _format_of(self, path: str, in_dims: int) -> QuantFormat:
        """The format of a layer of which this rank has `in_dims` inputs, or a table's.

        Stored shapes are those of the whole matrix, of which there may be several: the format that
        the config states decides, else the only one that fits.

        Raises:
            CheckpointError: none does, or more than one.
        """
        super()._format_of(path, in_dims)  # there must be one
        words, groups = self.shape(f"{path}.weight")[-1], self.shape(f"{path}.scales")[-1]
        integer_scales = self._file(f"{path}.scales").dtype == mx.uint8
        fitting = {
            form
            for whole in {*self._share.wholes(in_dims), in_dims} - {0}
            if (form := format_of_shapes(whole, words, groups, integer_scales=integer_scales))
        }
        original = self._original[f"{path}.scales"].removesuffix(".scales")
        assert self._quantization is not None
        stated = self._quantization.of(original)
        if stated in fitting:
            return stated
        if len(fitting) != 1:
            raise CheckpointError(
                f"The format of {original!r} cannot be told from its tensors on one of "
                f"{self._share.size} ranks; state it in config.json."
            )
        return fitting.pop()

    # -- parts of tensors -----------------------------------------------------------------------

    def _pop(self, name: str, shape: Sequence[int], parts: Sequence[int] | None) -> mx.array:
        """The part of a tensor that has this shape; all of it where none has."""
        tensor = self._file(name)
        del self._tensors[name]
        wanted = tuple(shape)
        if len(wanted) != tensor.ndim or wanted == tensor.shape:
            return self._read(tensor, ())
        axes = [
            i for i, pair in enumerate(zip(tensor.shape, wanted, strict=True)) if len({*pair}) > 1
        ]
        spans = self._spans(tensor.shape[axes[0]], wanted[axes[0]], parts)
        if len(axes) > 1 or spans is None:
            raise UnsupportedModelError(
                f"Rank {self._share.rank} of {self._share.size} would have {wanted} of the tensor "
                f"{self._original[name]!r} {tensor.shape}, which is no part of it: run this model "
                "with ranks=1."
            )
        axis = axes[0]
        self._cut.add(name)
        if axis == tensor.ndim - 1 and axis > 0:
            self._summands.add(name.rpartition(".")[0])
        read = [self._read(tensor, (slice(None),) * axis + (slice(*span),)) for span in spans]
        return read[0] if len(read) == 1 else mx.concatenate(read, axis=axis)

    def _spans(
        self, stored: int, wanted: int, parts: Sequence[int] | None
    ) -> list[tuple[int, int]] | None:
        """Which of `stored` numbers along an axis are `wanted` by this rank; None: unknown.

        Args:
            parts: how many of each kind are wanted; None: they are of one kind.
        """
        kinds = [wanted] if parts is None or sum(parts) != wanted else list(parts)
        wholes = self._wholes(stored, kinds)
        if wholes is None:
            return None
        starts = [0, *accumulate(wholes)]
        spans = []
        for own, (start, stop) in zip(kinds, pairwise(starts), strict=True):
            first = self._share.cut(stop - start, own)
            if first is None:
                return None
            spans.append((start + first, start + first + own))
        return spans

    def _wholes(self, stored: int, kinds: Sequence[int]) -> list[int] | None:
        """How many of each kind all ranks have together, `stored` in all; None: unknown.

        Kinds are divided alike, but where several ranks have the same of some.
        """
        if len(kinds) == 1:
            return [stored]
        options = {own: self._share.wholes(own) for own in kinds}
        for place in range(len(next(iter(options.values())))):
            alike = [options[own][place] for own in kinds]
            if sum(alike) == stored and 0 not in alike:
                return alike
        found = []
        for some in product(*[filter(None, options[own]) for own in dict.fromkeys(kinds)]):
            of_kind = dict(zip(options, some, strict=True))
            if sum(of_kind[own] for own in kinds) == stored:
                found.append([of_kind[own] for own in kinds])
        return found[0] if len({tuple(one) for one in found}) == 1 else None

    def _read(self, tensor: FileTensor, index: Index) -> mx.array:
        part = tensor.read(index)
        self.bytes_read += part.nbytes
        return part

    def _file(self, name: str) -> FileTensor:
        return self._files[self._original[name]]

    def _num_rows(self, vocab_size: int) -> int:
        """Of a table on each rank."""
        return -(-vocab_size // self._share.size)

    def _own_rows(self, name: str) -> mx.array:
        """This rank's rows of a table's tensor, as far as there are any."""
        tensor = self._file(name)
        count = self._num_rows(tensor.shape[0])
        first = self._share.rank * count
        return self._read(tensor, (slice(first, first + count),))

    def _rows(self, path: str, shape: tuple[int, int]) -> StoredMatrix:
        """This rank's rows of a table, zeros behind the last one."""
        vocab_size, width = shape
        count = self._num_rows(vocab_size)

        def rows(name: str) -> mx.array | None:
            full = f"{path}.{name}"
            if full not in self:
                return None
            if self.shape(full)[0] != vocab_size:
                raise CheckpointError(
                    f"Tensor {self._original[full]!r} has {self.shape(full)[0]} rows; expected "
                    f"{vocab_size}."
                )
            part = self._own_rows(full)
            self.drop(full)
            self._cut.add(full)
            return mx.pad(part, [(0, count - len(part)), (0, 0)])

        form = self._format_of(path, width) if f"{path}.scales" in self else None
        weight, scales, biases = (rows(name) for name in ("weight", "scales", "biases"))
        if weight is None:
            raise CheckpointError(f"Tensor {f'{path}.weight'!r} {shape} is missing.")
        if form is None:
            return StoredMatrix(weight.astype(self.dtype))
        if form.mode == "affine" and scales is not None and biases is not None:
            scales, biases = scales.astype(self.dtype), biases.astype(self.dtype)
        return StoredMatrix(weight, None, scales, biases, form)
