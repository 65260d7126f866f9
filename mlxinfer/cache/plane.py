"""The keys or the values of one layer in pages, written and read. Knows slots; no sequences.

H = KV heads, W = width of a stored part, P = page_size, N = tokens.

Pages are (H, num_pages * P, W): heads first, so that a run of pages is a view that attention takes
as it is. They are updated in place, which MLX does only while nobody else holds the buffer: write
them behind a barrier, and never keep a view in a variable across steps.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .formats import KVFormat

PIECE = 2048  # tokens that are decoded together

Runs = Sequence[tuple[int, int]]  # [from, to) ranges of pool slots
Tails = list[mx.array]  # each part (num_slots * heads * 2 * P, W)


@dataclass(frozen=True, slots=True)
class Views:
    """Runs of several sequences, as views: (which array, where in it) for each run of each."""

    covers: Runs  # ranges that hold all runs; each is decoded once
    stored: list[list[tuple[int, slice]]]  # in the only array of what is kept as vectors
    decoded: list[list[tuple[int, slice]]]  # in what the covers give

    @classmethod
    def of(cls, runs: Sequence[Runs], covers: Runs) -> "Views":
        """`covers`: none where all is kept as vectors."""
        begins = [begin for begin, _ in covers]

        def within(start: int, stop: int) -> tuple[int, slice]:
            place = bisect_right(begins, start) - 1
            return place, slice(start - begins[place], stop - begins[place])

        return cls(
            covers,
            [[(0, slice(*run)) for run in some] for some in runs],
            [[within(*run) for run in some if covers] for some in runs],
        )


class Plane:
    """The keys or the values of one layer, in one format: one array for each part of it.

    Args:
        fmt: how vectors are stored.
        tails: of the plane, or of keys and values together.
        tail_shape: heads and tokens of one tail.
        own: its heads among those of the tails.
    """

    __slots__ = ("_tail_shape", "fmt", "own", "pages", "tail_head", "tail_heads", "tails")

    def __init__(
        self, fmt: KVFormat, num_tokens: int, tails: Tails, tail_shape: tuple[int, int], own: slice
    ) -> None:
        self.fmt = fmt
        self.tails = tails
        self.tail_heads, self.tail_head = tail_shape[0], int(own.start)
        self.own = own
        self._tail_shape = tail_shape
        heads = own.stop - self.tail_head
        self.pages = [mx.zeros((heads, num_tokens, width), dtype) for width, dtype in fmt.parts]

    def own_tails(self) -> list[mx.array]:
        """Views (num_slots, H, 2 * P, W) of each part; not to be kept."""
        return [mx.unflatten(part, 0, (-1, *self._tail_shape))[:, self.own] for part in self.tails]

    def write_pages(self, runs: Runs, row: int, parts: list[mx.array]) -> None:
        """Store rows `row`, `row + 1`, ... of encoded parts (T, H, W) in the slots of `runs`."""
        for start, stop in runs:
            end = row + stop - start
            for pages, part in zip(self.pages, parts, strict=True):
                pages[:, start:stop] = part[row:end].swapaxes(0, 1)  # (H, N, W)
            row = end

    def copy_out(self, start: int, stop: int) -> list[mx.array]:
        """The stored parts (H, N, W) of one run of pages, as copies of their own."""
        return [mx.contiguous(pages[:, start:stop]) for pages in self.pages]

    def copy_in(self, parts: list[mx.array], start: int, slot: int, offset: int) -> None:
        """Store parts (H, N, W) in the pages from pool slot `start` on, and in a tail."""
        for i, (pages, part) in enumerate(zip(self.pages, parts, strict=True)):
            count = part.shape[1]
            pages[:, start : start + count] = part
            tails = mx.unflatten(self.tails[i], 0, (-1, *self._tail_shape))
            assert slot < len(tails), "MLX would write nowhere, and say nothing"
            tails[slot, self.own, offset : offset + count] = part
            self.tails[i] = tails.flatten(0, 2)

    def _decoded(self, parts: list[mx.array], after: mx.array | None = None) -> mx.array:
        """(H, N, D), a piece after the other: decoding takes several times what it gives."""
        count = parts[0].shape[1]
        if self.fmt.as_stored or (count <= PIECE and after is None):
            return self.fmt.decode(parts)
        pieces = []
        for start in range(0, count, PIECE):
            piece = [part[:, start : start + PIECE] for part in parts]
            after = self.fmt.decode(piece if after is None else mx.depends(piece, [after]))
            pieces.append(after)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def read_each(
        self, views: Views, after: mx.array | None = None, *, transposed: bool = False
    ) -> list[list[mx.array]]:
        """(H, N, D) of every run of several sequences, or (H, D, N).

        Args:
            views: the runs.
            after: where there is more than one cover, none is decoded before this is there.
            transposed: once for all, which is cheaper than for each run.
        """
        if self.fmt.as_stored:
            sources, each = self.pages, views.stored
        else:
            sources, each = self._read_covers(views.covers, after), views.decoded
        if transposed:
            sources = [source.swapaxes(1, 2) for source in sources]
            return [[sources[i][:, :, view] for i, view in some] for some in each]
        return [[sources[i][:, view] for i, view in some] for some in each]

    def _read_covers(self, covers: Runs, after: mx.array | None) -> list[mx.array]:
        decoded: list[mx.array] = []
        for cover in covers:
            decoded.append(self.read_runs([cover], after))
            after = decoded[-1] if len(covers) > 1 else None  # one is on its way at a time
        return decoded

    def read_runs(self, runs: Runs, after: mx.array | None = None) -> mx.array:
        """(H, N, D) of several runs, one after the other, decoded not before `after` is there."""
        if len(runs) == 1:
            start, stop = runs[0]
            return self._decoded([pages[:, start:stop] for pages in self.pages], after)
        joined = [
            mx.concatenate([pages[:, start:stop] for start, stop in runs], axis=1)
            for pages in self.pages
        ]
        return self._decoded(joined, after)

    def read_pages(self, ids: mx.array, page_size: int) -> mx.array:
        """(H, B, n * P, D) of pages `ids` (B, n), gathered."""
        # mx.take builds a shorter graph, and takes the CPU nine times as long to evaluate.
        parts = [mx.unflatten(pages, 1, (-1, page_size))[:, ids] for pages in self.pages]
        return mx.flatten(self.fmt.decode(parts), 2, 3)  # from (H, B, n, P, D)

    def grow_pages(self, extra_tokens: int) -> None:
        """Make room, one array at a time so that only one is ever there twice."""
        for i, pages in enumerate(self.pages):
            self.pages[i] = extended(pages, axis=1, extra=extra_tokens)
            del pages
            mx.eval(self.pages[i])


def extended(array: mx.array, *, axis: int, extra: int) -> mx.array:
    """With zeros behind it; padding writes the new array alone, where joining makes them first."""
    return mx.pad(array, [(0, extra if i == axis else 0) for i in range(array.ndim)])
