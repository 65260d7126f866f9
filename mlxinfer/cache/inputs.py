"""One step, as the KV cache gets it: work to do before it, and its new tokens. No MLX.

`Segments` are new tokens of sequences with their positions and slots. `CacheWork` is the work
on pages, tails and states between the step before and this one.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .disk.entry import Entry
from .pages import PageTable

Ints = NDArray[np.int32]
T = TypeVar("T")


@dataclass(slots=True)  # not frozen: each step makes some, and frozen ones take five times as long
class Segments:
    """New tokens of B sequences that attend together, as arrays, for all layer groups.

    Never changed, as is `StepMetadata`.
    """

    tables: list[list[PageTable]]  # (B,) of each segment one per layer group
    rows: Ints  # (B,) of the first tokens in the flat list
    starts: Ints  # (B,) their positions
    counts: Ints  # (B,)
    sealed: Ints  # (B,)
    slots: Ints  # (B,)
    width: int  # tokens of the longest
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def num_tokens(self) -> int:
        return len(self.rows) if self.width == 1 else int(self.counts.sum())

    def memoised(self, what: Hashable, work_out: Callable[[], T]) -> T:
        """Compute once a value that does not depend on `starts`; `at` keeps it."""
        if what not in self._memo:
            self._memo[what] = work_out()
        value: T = self._memo[what]
        return value

    def follows(self, other: "Segments") -> bool:
        return self._memo is other._memo

    def at(self, starts: Ints) -> "Segments":
        """The same sequences at other positions (B,), with the same memo."""
        return Segments(
            *(self.tables, self.rows, starts, self.counts, self.sealed, self.slots, self.width),
            self._memo,
        )

    def sealed_to(self, stops: Ints) -> "Segments":
        """The same tokens, with pages up to (B,) these positions before the tails."""
        return replace(self, sealed=stops, _memo={})

    def sealed_pages(self, group: int) -> "list[array[int]]":
        """(B,) for each segment the page of every sealed page number, int32; -1: recycled."""
        stops = self.sealed.tolist()
        return [
            tables[group].numbers_before(stop)
            for tables, stop in zip(self.tables, stops, strict=True)
        ]

    def some(self, places: NDArray[np.int64]) -> "Segments":
        return Segments(
            [self.tables[place] for place in places.tolist()],
            self.rows[places],
            self.starts[places],
            self.counts[places],
            self.sealed[places],
            self.slots[places],
            int(self.counts[places].max()),
        )

    def last(self, rows: Ints) -> "Segments | None":
        """The segments with only the tokens that are among `rows`; None: no token is.

        A token's row is then its place in `rows`.

        Args:
            rows: (R,) of the step, ascending; of a segment its last tokens.
        """
        first, stop = np.searchsorted(rows, [self.rows, self.rows + self.counts]).astype(np.int32)
        counts = stop - first
        if (first == self.rows).all() and (counts == self.counts).all():
            return self
        places = np.flatnonzero(counts)
        if not len(places):
            return None
        starts = self.starts + self.counts - counts
        width = int(counts.max())
        numbers = first, starts, counts, self.sealed, self.slots
        whole = Segments(self.tables, *numbers, width)
        return whole if len(places) == len(self) else whole.some(places)

    def joined(self, other: "Segments") -> "Segments":
        return Segments(
            self.tables + other.tables,
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.counts, other.counts]),
            np.concatenate([self.sealed, other.sealed]),
            np.concatenate([self.slots, other.slots]),
            max(self.width, other.width),
        )

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """Flat rows, slots and positions (N,) of all tokens."""
        if self.width == 1:
            return self.rows, self.slots, self.starts
        step = np.concatenate([np.arange(count, dtype=np.int32) for count in self.counts])
        rows, slots, starts = (
            np.repeat(part, self.counts) for part in (self.rows, self.slots, self.starts)
        )
        return rows + step, slots, starts + step


@dataclass(slots=True)
class StepMetadata:
    """All new tokens of one step: where they lie, and what each of them sees.

    A token sees [begin, end) of its own sequence. `end` is one past its own position, and `begin`
    follows from the window of a layer group. In groups that see spans, a token of a span, such as a
    picture, sees the later tokens of the span, too. The tokens of a span are computed in one step.
    """

    # segments of few tokens, first in the flat list: their tokens go to tails
    short: list[Segments]
    long: Sequence[Segments]  # prefill chunks, one each: their tokens go to pages
    positions: Ints  # (T,) each token's place in its own sequence, in flat order
    verified: Sequence[int] = ()  # tails with proposals in the step: a commit says which stay
    # (2, T) positions from, and up to, of the span of each token. None: each is alone.
    spans: Ints | None = None
    # (T,), or (3, T) with M-RoPE: rope positions, where pictures moved any. None: `positions`.
    moved_rope_positions: Ints | None = None

    @property
    def rope_positions(self) -> Ints:
        moved = self.moved_rope_positions
        return self.positions if moved is None else moved

    def narrowed(self, rows: Ints) -> "StepMetadata":
        """The same step with only the tokens of `rows`, which attend to what all tokens store.

        Args:
            rows: (R,) ascending; of a segment its last tokens.
        """
        parts = [[part.last(rows) for part in parts] for parts in (self.short, self.long)]
        short, long = ([part for part in column if part is not None] for column in parts)
        spans, moved = self.spans, self.moved_rope_positions
        return StepMetadata(
            short,
            long,
            self.positions[rows],
            spans=None if spans is None else spans[:, rows],
            moved_rope_positions=None if moved is None else moved[..., rows],
        )

    def spans_of(self, first: int, count: int) -> Ints | None:
        """(2, n) spans of `count` tokens from row `first` on; None: none sees a later token."""
        if self.spans is None:
            return None
        rows = slice(first, first + count)
        return (
            self.spans[:, rows] if (self.spans[1, rows] > self.positions[rows] + 1).any() else None
        )


def ints(values: list[int]) -> Ints:
    """(N,) int32."""
    return np.array(values, dtype=np.int32)


class Move(NamedTuple):
    """Tokens of one sequence, positions [start, stop), to be written to its pages.

    The tokens come from the sequence's tail. With `pages` they are the first tokens of a shared
    page, and are written to the tail, too.
    """

    tables: list[PageTable]  # of the sequence, one per layer group
    slot: int  # of its tail
    start: int
    stop: int
    pages: tuple[int | None, ...] = ()  # by group: the shared page; None: no later token sees it


class PageTransfer(NamedTuple):
    """A page, or a snapshot of states, and the entry on disk that it goes to or comes from."""

    group: int
    page: int  # or the number of the snapshot
    entry: Entry  # its payload is empty until the page was read out

    def filled(self, payload: bytes | memoryview) -> Entry:
        return replace(self.entry, payload=memoryview(payload))


@dataclass(slots=True)
class CacheWork:
    """Work to do before a step, in this order.

    `seal` and `save` come first, because an evicted page may hold tokens that are written only now.
    Then come `spill` and `load`. `copies` and `resume` may read loaded pages. `drop` is last.
    """

    seal: list[Move] = field(default_factory=list)
    spill: list[PageTransfer] = field(default_factory=list)
    load: list[PageTransfer] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)
    save: list[tuple[int, int]] = field(default_factory=list)  # slot, snapshot of its state
    leave: list[int] = field(default_factory=list)  # slots that were given up
    resume: list[tuple[int, int]] = field(default_factory=list)  # snapshot, slot to go on from it
    drop: list[int] = field(default_factory=list)  # snapshots that were given up

    @property
    def writes_pages(self) -> bool:
        return bool(self.seal or self.spill or self.load or self.copies)

    @property
    def num_slots(self) -> int:
        slots = [copy.slot for copy in self.copies] + [move.slot for move in self.seal]
        return 1 + max(slots, default=-1)


def seal_index(
    moves: Sequence[Move], group: int, page_size: int
) -> tuple[Ints, Ints, Ints, Ints] | None:
    """Tail slots, offsets in the tails and pool slots (N,) of the tokens that move.

    And the pool slots (N,) of the tokens that stand a page before them, negative for none.

    Args:
        moves: tokens of pages that a window has already recycled are left out.

    Returns:
        None: nothing moves.
    """
    # For each page in turn: itself, the one before, its first position, slot, from, to.
    page_moves: list[int] = []
    for tables, slot, start, stop, _ in moves:
        table = tables[group]
        for number in range(start // page_size, -(-stop // page_size)):
            page, last = table.page_at(number), table.page_at(number - 1) if number else None
            if page is not None:
                first = number * page_size
                page_moves += page, -1 if last is None else last, first, slot, start, stop
    if not page_moves:
        return None
    pages, before, firsts, slots, starts, stops = ints(page_moves).reshape(-1, 6).T[:, :, None]
    step = np.arange(page_size, dtype=np.int32)
    positions = firsts + step  # (n, page_size)
    moving = (positions >= starts) & (positions < stops)
    places = positions % (2 * page_size), pages * page_size + step, before * page_size + step
    offsets, targets, earlier = (place[moving] for place in places)
    return np.broadcast_to(slots, moving.shape)[moving], offsets, targets, earlier
