"""New tokens of sequences, as the KV cache sees them. Knows positions and slots, no MLX."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .pages import PageTable

Ints = NDArray[np.int32]


class Span(Protocol):
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
class ShortSpans:
    """B short spans that attend together, as arrays: worked out once for all layer groups."""

    spans: list[Span]
    rows: Ints  # (B,) of the first tokens in the flat list
    starts: Ints  # (B,) their positions
    counts: Ints  # (B,)
    sealed: Ints  # (B,)
    slots: Ints  # (B,)

    @staticmethod
    def of(spans: list[Span]) -> "ShortSpans":
        """Read the spans."""
        return ShortSpans(
            spans,
            _ints([span.row for span in spans]),
            _ints([span.start for span in spans]),
            _ints([span.num_tokens for span in spans]),
            _ints([span.sealed for span in spans]),
            _ints([span.slot for span in spans]),
        )

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """Flat rows, slots and positions (N,) of all tokens."""
        if self.counts.max() == 1:
            return self.rows, self.slots, self.starts
        step = np.concatenate([np.arange(count, dtype=np.int32) for count in self.counts])
        rows, slots, starts = (
            np.repeat(part, self.counts) for part in (self.rows, self.slots, self.starts)
        )
        return rows + step, slots, starts + step


@dataclass(frozen=True, slots=True)
class StepSpans:
    """All new tokens of one step."""

    short: list[ShortSpans]  # first in the flat list: what goes to tails
    long: Sequence[Span]  # prefill chunks, which go to pages
    positions: Ints  # (T,) each token's place in its own sequence, in flat order

    @staticmethod
    def of(short: Sequence[Span], long: Sequence[Span]) -> "StepSpans":
        """Read the spans."""
        together = _by_width(short)
        parts = [spans.tokens()[2] for spans in together]
        parts += [np.arange(span.start, span.stop, dtype=np.int32) for span in long]
        return StepSpans(together, long, parts[0] if len(parts) == 1 else np.concatenate(parts))


def _by_width(short: Sequence[Span]) -> list[ShortSpans]:
    """Single tokens together, and the few wider spans together: padding stays small."""
    single = [span for span in short if span.num_tokens == 1]
    wide = [span for span in short if span.num_tokens > 1] if len(single) < len(short) else []
    return [ShortSpans.of(spans) for spans in (single, wide) if spans]


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
