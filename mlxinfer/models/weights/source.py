"""Where a model's tensors come from: a checkpoint, or the part of each tensor that a rank has.

A source renames and slices. A family asks for tensors in the sizes of its config. A rank's config
has smaller sizes than the files; which numbers the rank has follows from its share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedModelError
from .share import Share
from .tensors import FileTensor, Tensor, loaded, side_by_side

MIN_RUN = 1 << 14  # bytes: reading shorter runs one by one costs more than reading all between them
BLOCK = 1 << 24  # bytes that are read at once where runs are short

Rename = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Slices:
    """The part of a tensor that a rank has."""

    axis: int  # counted from the end
    spans: list[tuple[int, int]]  # along the axis
    stored: int  # length of the axis in the file


class Checkpoint:
    """The tensors of a checkpoint, or one rank's part of them, each taken once.

    Args:
        rename: gives the decoder's names; None: the tensor is left out.
        share: of a rank; the tensors must be in files. None: tensors are whole.

    Attributes:
        tensors: as stored, those that are not taken yet.
        num_bytes: of all tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        rename: Rename | None = None,
        share: Share | None = None,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.share = share
        self._original: dict[str, str] = {}
        self._slices: dict[str, Slices] = {}
        for name, tensor in tensors.items():
            renamed = rename(name) if rename else name
            if renamed is None:
                continue
            if renamed in self.tensors:
                first = self._original[renamed]
                raise CheckpointError(f"{first!r} and {name!r} are the same tensor.")
            self.tensors[renamed] = tensor
            self._original[renamed] = name
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def original(self, name: str) -> str:
        """The checkpoint's name of a tensor."""
        return self._original[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def has_shape(self, name: str, shape: Sequence[int]) -> bool:
        """Whether there is a tensor of this name, and `take` would give this shape of it."""
        if name not in self:
            return False
        stored = self.shape(name)
        if self.share is None or len(stored) != len(shape):
            return stored == tuple(shape)
        return all(self.share.cut(*pair) is not None for pair in zip(stored, shape, strict=True))

    def stored_apart(self, stack: str, single: str, shape: tuple[int, int, int]) -> bool:
        """Whether each expert's matrix is a tensor of its own; see `Weights.experts`."""
        if f"{stack}.weight" in self:
            return False
        return any(f"{single.format(i)}.weight" in self for i in range(shape[0]))

    def slices(self, name: str) -> Slices | None:
        """The part that was taken of a tensor; None: all of it."""
        return self._slices.get(name)

    def drop(self, *names: str) -> None:
        for name in names:
            self.tensors.pop(name, None)

    def take(self, name: str, shape: Sequence[int], parts: Sequence[int] | None = None) -> Tensor:
        """The tensor, or the part of it that has this shape; it is not there afterwards.

        Args:
            parts: how many outputs of each kind stand side by side; None: they are of one kind.
        """
        wanted = tuple(shape)
        if name not in self:
            raise CheckpointError(f"Tensor {name!r} {wanted} is missing.")
        tensor = self.tensors.pop(name)
        if tensor.shape == wanted:
            return tensor
        if self.share is None or tensor.ndim != len(wanted):
            raise CheckpointError(
                f"Tensor {self._original[name]!r} has shape {tensor.shape}; expected {wanted}."
            )
        slices = self._find_slices(name, tensor, wanted, parts)
        self._slices[name] = slices
        assert isinstance(tensor, FileTensor)
        pieces = [_sliced(tensor, tensor.ndim + slices.axis, span) for span in slices.spans]
        return pieces[0] if len(pieces) == 1 else side_by_side(pieces, slices.axis)

    def rows(self, name: str) -> Tensor:
        """A table's tensor, or the rows of it that a rank has; it can be taken afterwards.

        Each rank has as many rows but the last, which may have fewer.
        """
        tensor = self.tensors[name]
        if self.share is None:
            return tensor
        assert isinstance(tensor, FileTensor)
        count = -(-tensor.shape[0] // self.share.size)
        first = min(self.share.rank * count, tensor.shape[0])
        return tensor.cut(0, first, min(first + count, tensor.shape[0]))

    def _find_slices(
        self, name: str, tensor: Tensor, wanted: tuple[int, ...], parts: Sequence[int] | None
    ) -> Slices:
        assert self.share is not None
        pairs = list(zip(tensor.shape, wanted, strict=True))
        axis, *more = [i for i, (stored, size) in enumerate(pairs) if stored != size]
        spans = _spans(self.share, *pairs[axis], parts)
        if more or spans is None:
            raise UnsupportedModelError(
                f"Rank {self.share.rank} of {self.share.size} would have {wanted} of the tensor "
                f"{self._original[name]!r} {tensor.shape}, which is no part of it: divide this "
                "model by layers (pipeline), or run it with ranks=1."
            )
        return Slices(axis - tensor.ndim, spans, tensor.shape[axis])


def _spans(
    share: Share, stored: int, wanted: int, parts: Sequence[int] | None
) -> list[tuple[int, int]] | None:
    """Which of `stored` numbers along an axis are the `wanted` ones of a rank; None: unknown.

    Args:
        stored, wanted: numbers.
        parts: how many of each kind are wanted; None: they are of one kind.
    """
    kinds = [wanted] if parts is None or sum(parts) != wanted else list(parts)
    wholes = _wholes(share, stored, kinds)
    if wholes is None:
        return None
    spans = []
    for count, (start, stop) in zip(kinds, pairwise([0, *accumulate(wholes)]), strict=True):
        first = share.cut(stop - start, count)
        if first is None:
            return None
        spans.append((start + first, start + first + count))
    return spans


def _wholes(share: Share, stored: int, kinds: Sequence[int]) -> list[int] | None:
    """How many of each kind all ranks have together, `stored` in all; None: unknown.

    Kinds are divided alike, except where several ranks have the same numbers of some.
    """
    if len(kinds) == 1:
        return [stored]
    options = {count: share.wholes(count) for count in kinds}
    for choice in range(len(next(iter(options.values())))):
        alike = [options[count][choice] for count in kinds]
        if sum(alike) == stored and 0 not in alike:
            return alike
    choices = set()
    for option in product(*[filter(None, options[count]) for count in dict.fromkeys(kinds)]):
        of_kind = dict(zip(options, option, strict=True))
        if sum(of_kind[count] for count in kinds) == stored:
            choices.add(tuple(of_kind[count] for count in kinds))
    return list(choices.pop()) if len(choices) == 1 else None


def _sliced(tensor: FileTensor, axis: int, span: tuple[int, int]) -> Tensor:
    """The numbers at a span of an axis: not read yet if they are a few long runs in the file."""
    part = tensor.cut(axis, *span)
    if axis == 0 or part.nbytes >= MIN_RUN * len(part.spans):
        return part
    num_rows, row_bytes = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    step, blocks = max(BLOCK // row_bytes, 1), []
    for start in range(0, num_rows, step):
        block = loaded(tensor.cut(0, start, min(start + step, num_rows)))
        blocks.append(mx.contiguous(block[(slice(None),) * axis + (slice(*span),)]))
        mx.eval(blocks[-1])
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
