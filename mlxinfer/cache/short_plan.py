"""What a way for short spans to attend must offer. Knows no way."""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from .pool import LayerPool
from .spans import Ints, ShortSpans


class ShortPlan(Protocol):
    """How some short spans attend, in every layer of a group."""

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these spans see, (T', heads * V)."""
        ...


Part = tuple[Ints, ShortPlan]  # flat rows (T',) of some spans, in order, and how they attend
Planner = Callable[[ShortSpans, int], list[Part]]  # of spans among so many rows of a step
