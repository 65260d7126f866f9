"""Layer groups: layers that keep the same thing under the same rule. Pure Python; no arrays of MLX.

A page group keeps a vector or more for each token, in pages: attention or latent attention, over
all positions or a window with sinks. A state group keeps one state for a whole sequence: recurrent
layers. `num_skippable` says for each of them which positions no later token needs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pages import PageAllocator, PageTable

Positions = NDArray[np.int32] | np.int64
ENDLESS = 2**31  # more tokens than any sequence has


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The token at position q sees k <= q where k < sinks or k > q - size; `size` None: all.

    `chunked`: it sees k <= q of the same chunk, which are `size` positions from a multiple of it.
    """

    size: int | None = None
    sinks: int = 0
    chunked: bool = False

    def lowest(self, position: int) -> int:
        """The first position after the sinks that the token at `position` sees."""
        return int(self.lowest_of(np.int64(position)))

    def lowest_of(self, positions: Positions) -> Positions:
        """`lowest` of each of many positions."""
        if self.size is None:
            return positions * 0
        if self.chunked:
            return positions - positions % self.size
        return np.maximum(positions - self.size + 1, 0)

    def ranges(self, position: int, stop: int) -> list[tuple[int, int]]:
        """Positions before `stop` that tokens from `position` on may see, as few ranges."""
        lowest = self.lowest(position)
        if lowest <= self.sinks:
            return [(0, stop)] if stop else []
        parts = [(0, min(self.sinks, stop)), (lowest, stop)]
        return [(start, end) for start, end in parts if start < end]

    def sees(
        self,
        queries: NDArray[np.int32],
        keys: NDArray[np.int32],
        spans: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """Whether each query position sees each key position; arrays that broadcast.

        Args:
            queries, keys: positions.
            spans: (2, ...) positions from, and up to, that each query sees besides, with the axes
                of `queries`; None: none.
        """
        visible = keys <= queries
        if self.size is not None:
            visible &= (keys >= self.lowest_of(queries)) | (keys < self.sinks)
        if spans is not None:
            visible |= (keys >= spans[0]) & (keys < spans[1])
        return visible

    def kept_pages(self, page_size: int) -> int:
        """Pages at the front that hold sinks and are never recycled."""
        return 0 if self.size is None else -(-self.sinks // page_size)

    def first_page(self, position: int, page_size: int) -> int:
        """The first page after the kept ones that tokens from `position` on still see."""
        return self.lowest(position) // page_size

    def max_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Pages that a sequence of `num_tokens` needs at once, prefilled `chunk` at a time."""
        pages = -(-num_tokens // page_size)
        if self.size is None:
            return pages
        held = -(-(self.size - 1) // page_size) + 1 + self.kept_pages(page_size)
        return min(pages, held + chunk // page_size)


@dataclass(slots=True)
class PageGroup:
    """Layers that keep the same positions of every sequence, and so share page tables.

    Args:
        window: which positions a token sees.
        allocator: of the group's pages.
        page_size: tokens a page.
        prefill_chunk: tokens of a step's prefill; windows hold that much more for a moment.
        page_bytes: of a page, all layers together.
    """

    window: AttentionWindow
    allocator: PageAllocator
    page_size: int
    prefill_chunk: int
    page_bytes: int

    @property
    def num_kept(self) -> int:
        """Pages at the front that are never recycled: they hold sinks."""
        return self.window.kept_pages(self.page_size)

    @property
    def recycles(self) -> bool:
        """Whether pages of a running sequence ever become free."""
        return self.num_skippable(ENDLESS) > 0

    def num_skippable(self, num_tokens: int) -> int:
        """Positions, from the sinks on, that no token after the first `num_tokens` needs."""
        return self.window.lowest(num_tokens)

    def first_page(self, num_tokens: int) -> int:
        """Number of the first page, after the sinks', that a later token needs."""
        return self.num_skippable(num_tokens) // self.page_size

    def needed_pages(self, num_tokens: int) -> list[int]:
        """Numbers of the whole pages that are needed to go on after `num_tokens` positions."""
        first = self.first_page(num_tokens)
        return [*range(min(self.num_kept, first)), *range(first, num_tokens // self.page_size)]

    def max_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` holds at once, at most."""
        return self.window.max_pages(num_tokens, self.prefill_chunk, self.page_size)

    def begin(self, restored: int, num_known: int) -> int:
        """Positions to have pages for when a sequence of `num_known` tokens begins.

        All that are known where none is ever recycled, so that a prompt lies in one run of pages;
        else those that are restored.
        """
        return restored if self.recycles else num_known

    def commit(self, table: PageTable, num_tokens: int) -> list[int]:
        """Recycle pages that no token after the first `num_tokens` needs; they are returned."""
        return table.drop_before(self.first_page(num_tokens))


class StateGroup:
    """Layers that keep a state of fixed size of each sequence, and snapshots of such states.

    A state cannot go back: a sequence resumes only where a snapshot was taken. Snapshots are known
    by numbers that are never used twice, so that one may be dropped and another be taken before
    either is done to the arrays.

    Args:
        num_bytes: of one state, all layers together.
        max_snapshots: that may be there at once.
    """

    def __init__(self, num_bytes: int, max_snapshots: int) -> None:
        self.num_bytes = num_bytes
        self.max_snapshots = max_snapshots
        self.num_held = 0
        self._num_taken = 0
        self._dropped: list[int] = []

    @property
    def has_room(self) -> bool:
        """Whether one more snapshot may be taken."""
        return self.num_held < self.max_snapshots

    def num_skippable(self, num_tokens: int) -> int:
        """Positions that no later token needs: all, since a state stands for them."""
        return num_tokens

    def allocate(self) -> int:
        """The number of a new snapshot."""
        assert self.has_room
        self.num_held += 1
        self._num_taken += 1
        return self._num_taken

    def release(self, snapshot: int) -> None:
        """Give a snapshot up; its arrays go with the next step."""
        self.num_held -= 1
        self._dropped.append(snapshot)

    def take_dropped(self) -> list[int]:
        """Snapshots that were given up since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped
