"""What a way for short segments to attend must offer. Knows no way."""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from .pool import LayerPool
from .segments import Ints, Segments


class ShortPlan(Protocol):
    """How some short segments attend, in every layer of a group."""

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        ...


Part = tuple[Ints, ShortPlan]  # flat rows (T',) of some segments, in order, and how they attend
Planner = Callable[[Segments, int], list[Part]]  # of segments among so many rows of a step
