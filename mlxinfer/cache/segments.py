"""New tokens of sequences, as the KV cache sees them. Knows positions and slots, no MLX."""

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .page_table import PageTable

Ints = NDArray[np.int32]
T = TypeVar("T")


class QuerySegment(Protocol):
    """New tokens of one sequence, as the KV cache sees them."""

    row: int  # of the first token in the step's flat list
    start: int  # its position
    num_tokens: int
    sealed: int  # positions before the tail
    slot: int  # of the tail
    tables: list[PageTable]  # one per layer group

    @property
    def stop(self) -> int:
        """One past the last position."""
        ...


@dataclass(frozen=True, slots=True)
class Segments:
    """B short segments that attend together, as arrays: worked out once for all layer groups."""

    tables: list[list[PageTable]]  # (B,) of each segment one per layer group
    rows: Ints  # (B,) of the first tokens in the flat list
    starts: Ints  # (B,) their positions
    counts: Ints  # (B,)
    sealed: Ints  # (B,)
    slots: Ints  # (B,)
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(segments: Sequence[QuerySegment]) -> "Segments":
        """Read the segments."""
        return Segments(
            [segment.tables for segment in segments],
            ints([segment.row for segment in segments]),
            ints([segment.start for segment in segments]),
            ints([segment.num_tokens for segment in segments]),
            ints([segment.sealed for segment in segments]),
            ints([segment.slot for segment in segments]),
        )

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return self.memoised("width", lambda: int(self.counts.max()))

    def memoised(self, what: Hashable, work_out: Callable[[], T]) -> T:
        """Compute once what follows from all but `starts`; `advance` keeps it."""
        if what not in self._memo:
            self._memo[what] = work_out()
        found: T = self._memo[what]
        return found

    def advance(self) -> "Segments":
        """The next token of each sequence; pages and tails are unchanged."""
        return self.at(self.starts + 1)

    def at(self, starts: Ints) -> "Segments":
        """The same sequences at other positions (B,), with the same memo."""
        return Segments(
            self.tables,
            self.rows,
            starts,
            self.counts,
            self.sealed,
            self.slots,
            self._memo,
        )

    def sealed_to(self, stops: Ints) -> "Segments":
        """The same tokens, with pages up to (B,) these positions before the tails."""
        return Segments(self.tables, self.rows, self.starts, self.counts, stops, self.slots)

    def sealed_pages(self, group: int) -> "list[array[int]]":
        """(B,) for each segment the page of every sealed page number, int32; -1: recycled."""
        stops = self.sealed.tolist()
        return [
            tables[group].numbers_before(stop)
            for tables, stop in zip(self.tables, stops, strict=True)
        ]

    def some(self, places: NDArray[np.int64]) -> "Segments":
        """Those at these places among the B."""
        return Segments(
            [self.tables[place] for place in places.tolist()],
            self.rows[places],
            self.starts[places],
            self.counts[places],
            self.sealed[places],
            self.slots[places],
        )

    def joined(self, other: "Segments") -> "Segments":
        """These and others that come right after them in the flat list."""
        return Segments(
            self.tables + other.tables,
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.counts, other.counts]),
            np.concatenate([self.sealed, other.sealed]),
            np.concatenate([self.slots, other.slots]),
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


@dataclass(frozen=True, slots=True)
class StepSegments:
    """All new tokens of one step."""

    short: list[Segments]  # first in the flat list: what goes to tails
    long: Sequence[QuerySegment]  # prefill chunks, which go to pages
    positions: Ints  # (T,) each token's place in its own sequence, in flat order

    @staticmethod
    def of(
        short: Sequence[QuerySegment], long: Sequence[QuerySegment], single: Segments | None = None
    ) -> "StepSegments":
        """Read the segments of a step.

        Args:
            short: those of few tokens, single ones first.
            long: prefill chunks, which come last in the flat list.
            single: segments of one token that come first of all.
        """
        together = _by_width(short, single)
        parts = [segments.tokens()[2] for segments in together]
        parts += [np.arange(segment.start, segment.stop, dtype=np.int32) for segment in long]
        return StepSegments(together, long, parts[0] if len(parts) == 1 else np.concatenate(parts))


def _by_width(short: Sequence[QuerySegment], single: Segments | None) -> list[Segments]:
    """Single tokens together, and the few wider segments together: padding stays small."""
    if not short:
        return [] if single is None else [single]
    ones = [segment for segment in short if segment.num_tokens == 1]
    wide = [segment for segment in short if segment.num_tokens > 1]
    together = [Segments.of(segments) for segments in (ones, wide) if segments]
    if single is None:
        return together
    return [single.joined(together[0]), *together[1:]] if ones else [single, *together]


def ints(values: list[int]) -> Ints:
    """(N,) int32."""
    return np.array(values, dtype=np.int32)
