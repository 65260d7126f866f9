"""The weights of one rank: of each stored tensor the part that its config asks for, and no more.

A family asks for tensors in the sizes of its config. Where that is a rank's, they are smaller than
what is stored; which numbers they are follows from the rank's share. A matrix with cut inputs
gives summands: its projection sums them over the ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, UnsupportedModelError
from ..layers.factory import Inputs, Origin
from ..layers.linear import Embedding, Projection
from ..layers.mlp import FeedForward
from ..layers.ranks import Link, SplitEmbedding, SplitHead, Summed, SummedBlock, Sums
from .matrix import StoredMatrix
from .quantization import QuantFormat, Quantization, format_of_shapes
from .share import Share
from .tensors import FileTensor, Tensor, loaded, side_by_side
from .weights import Rename, Weights

MIN_RUN = 1 << 14  # bytes: of shorter runs each read costs more than what it brings
BLOCK = 1 << 24  # bytes that are read at once to take short runs of them


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a tensor a rank has."""

    axis: int  # from behind
    spans: list[tuple[int, int]]  # along it
    stored: int  # numbers along it, in the file


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
        adaptable: bool = False,
    ) -> None:
        self._files = tensors
        super().__init__(
            tensors,
            quantization=quantization,
            dtype=dtype,
            fits_float16=fits_float16,
            rename=rename,
            watch=watch,
            adaptable=adaptable,
        )
        self.share = self._share = share
        self._link = link
        self._sums = Sums(link)
        self._cut: dict[str, Cut] = {}
        self._summands: set[str] = set()  # matrices with cut inputs
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
                f"{path} is one norm over what several ranks would have: divide this model by "
                "layers (pipeline), or run it with ranks=1."
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
        return replace(found, bias=self.once(found.bias))

    def named(
        self, stored: StoredMatrix, path: str, tensor: str, *, outputs_axis: int = -2
    ) -> StoredMatrix:
        """As of `Weights`, with the outputs or inputs that this rank has of it."""
        found = super().named(stored, path, tensor, outputs_axis=outputs_axis)
        cut = self._cut.get(tensor)
        if cut is None:
            return found
        if cut.axis == outputs_axis:
            rows = np.concatenate([np.arange(*span, dtype=np.int32) for span in cut.spans])
            return replace(found, origins=(Origin(path, len(rows), cut.stored, rows),))
        ((start, stop),) = cut.spans
        each = found.in_dims // (stop - start)  # inputs of a word, or of a group
        return replace(found, inputs=Inputs(start * each, cut.stored * each))

    def experts(
        self, stack: str, each: str, shape: tuple[int, int, int], **options: Any
    ) -> StoredMatrix:
        """As of `Weights`; biases as of `matrix`."""
        found = super().experts(stack, each, shape, **options)
        if each.format(0) not in self._summands or found.bias is None:
            return found
        return replace(found, bias=self.once(found.bias))

    def head(self, path: str, shape: tuple[int, int]) -> Projection:
        """The output projection, of which each rank has some of the rows."""
        part, count = self._rows(path, shape), self._num_rows(shape[0])
        rows = np.arange(count, dtype=np.int32) + self._share.rank * count
        origin = Origin(path, count, shape[0], rows.clip(max=shape[0] - 1))  # what is more is cut
        part = replace(part, origins=(origin,))
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
                mx.array_equal(
                    loaded(self._own_rows(f"{path}.{part}")),
                    loaded(self._own_rows(f"{other}.{part}")),
                )
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

    def _pop(self, name: str, shape: Sequence[int], parts: Sequence[int] | None) -> Tensor:
        """The part of a tensor that has this shape; all of it where none has."""
        tensor = self._file(name)
        del self._tensors[name]
        wanted = tuple(shape)
        if len(wanted) != tensor.ndim or wanted == tensor.shape:
            return self._counted(tensor)
        axes = [
            i for i, pair in enumerate(zip(tensor.shape, wanted, strict=True)) if len({*pair}) > 1
        ]
        spans = self._spans(tensor.shape[axes[0]], wanted[axes[0]], parts)
        if len(axes) > 1 or spans is None:
            raise UnsupportedModelError(
                f"Rank {self._share.rank} of {self._share.size} would have {wanted} of the tensor "
                f"{self._original[name]!r} {tensor.shape}, which is no part of it: divide this "
                "model by layers (pipeline), or run it with ranks=1."
            )
        axis = axes[0]
        self._cut[name] = Cut(axis - tensor.ndim, spans, tensor.shape[axis])
        if axis == tensor.ndim - 1 and axis > 0:
            self._summands.add(name.rpartition(".")[0])
        found = [self._cut_at(tensor, axis, span) for span in spans]
        return found[0] if len(found) == 1 else side_by_side(found, axis - tensor.ndim)

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

    def _cut_at(self, tensor: FileTensor, axis: int, span: tuple[int, int]) -> Tensor:
        """What lies at a span of an axis: in its file where that is a few long runs, else read."""
        part = self._counted(tensor.cut(axis, *span))
        if axis == 0 or part.nbytes >= MIN_RUN * len(part.spans):
            return part
        return _read_short_runs(tensor, (slice(None),) * axis + (slice(*span),))

    def _counted(self, tensor: FileTensor) -> FileTensor:
        self.bytes_read += tensor.nbytes
        return tensor

    def _file(self, name: str) -> FileTensor:
        return self._files[self._original[name]]

    def _num_rows(self, vocab_size: int) -> int:
        """Of a table on each rank."""
        return -(-vocab_size // self._share.size)

    def _own_rows(self, name: str) -> FileTensor:
        """This rank's rows of a table's tensor, as far as there are any."""
        tensor = self._file(name)
        count = self._num_rows(tensor.shape[0])
        first = self._share.rank * count
        last = min(first + count, tensor.shape[0])
        return self._counted(tensor.cut(0, min(first, last), last))

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
            part = self._own_rows(full).read()
            self.drop(full)
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


def _read_short_runs(tensor: FileTensor, index: tuple[slice, ...]) -> mx.array:
    """A part of a tensor that lies in many short runs: what is around them is read, by blocks."""
    num_rows, row_bytes = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    step, parts = max(BLOCK // row_bytes, 1), []
    for start in range(0, num_rows, step):
        block = tensor.cut(0, start, min(start + step, num_rows)).read()
        parts.append(mx.contiguous(block[index]))
        mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
