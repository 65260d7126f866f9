"""One step of the KV cache worked out ahead: who writes where, and how all attend. Knows no layer.

Once per step and layer group, for all layers of the group. Short segments (decode, verification)
come first in the flat list of tokens and go to tails; long ones (prefill chunks) go to pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..metal_kernels.heads import Form
from ..metal_kernels.kv_write import KVWrite
from .chunk_attention import ChunkPlan, plan_chunk
from .segments import Ints, QuerySegment, Segments, StepSegments
from .short_plan import Planner, ShortPlan
from .tail_place import TailPlace
from .window import AttentionWindow

MIN_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All segments of one step for one layer group."""

    parts: Sequence[ShortPlan | ChunkPlan]  # of short segments, then `long`
    long: Sequence[ChunkPlan]
    order: mx.array | None  # (T,) from what the parts give, one after another, to flat order
    tail_rows: mx.array | None  # (N,) flat rows that go to tails; None: all of them, in order
    tail_place: TailPlace | None  # where the N tokens go; None: none does
    positions: mx.array | None  # see padded_positions; None: no layer writes through a kernel
    # By what the kernel does to heads; a model has one dtype.
    writes: dict[Form, KVWrite] = field(default_factory=dict)


def plan_group(
    segments: StepSegments,
    *,
    group: int,
    window: AttentionWindow,
    page_size: int,
    planner: Planner,
    positions: mx.array | None,
) -> GroupPlan:
    """Plan one step of layer group `group`; `positions` as `padded_positions` gives them."""
    ring = 2 * page_size
    rows, slots, places = _tail_writes(segments.short, segments.long, page_size)
    num_rows = len(segments.positions)
    parts = [part for some in segments.short for part in planner(some, num_rows)]
    long = [plan_chunk(segment, group, window) for segment in segments.long]
    return GroupPlan(
        parts=[*[plan for _, plan in parts], *long],
        long=long,
        order=_order([rows for rows, _ in parts], num_rows),
        tail_rows=None if len(rows) == num_rows else mx.array(rows),
        tail_place=TailPlace(slots, places % ring, ring) if len(rows) else None,
        positions=positions,
    )


def _order(parts: Sequence[Ints], num_rows: int) -> mx.array | None:
    """(T,) where each row of the step stands when those of `parts` come first; None: in place."""
    if len(parts) < 2:
        return None
    rows = np.concatenate(parts)
    if (np.diff(rows) > 0).all():
        return None
    order = np.arange(num_rows, dtype=np.int32)
    order[rows] = np.arange(len(rows), dtype=np.int32)
    return mx.array(order)


def padded_positions(positions: Ints) -> mx.array:
    """(T,) -> (max(T, 8),), zeros at the end: fewer would be another variant of the kernel."""
    if len(positions) >= MIN_POSITIONS:
        return mx.array(positions)
    padded = np.zeros(MIN_POSITIONS, np.int32)
    padded[: len(positions)] = positions
    return mx.array(padded)


def _tail_writes(
    short: Sequence[Segments], long: Sequence[QuerySegment], page_size: int
) -> tuple[Ints, Ints, Ints]:
    """Flat rows, slots and positions (N,) of the tokens that go to tails.

    Of a prefill chunk that is what its last, not yet full page holds.
    """
    parts = [segments.tokens() for segments in short]
    for s in long:
        rest = min(s.stop % page_size, s.num_tokens)  # what came before is in the tail already
        step = np.arange(-rest, 0, dtype=np.int32)
        parts.append((s.row + s.num_tokens + step, np.full_like(step, s.slot), s.stop + step))
    if len(parts) == 1:
        return parts[0]
    rows, slots, positions = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(slots), np.concatenate(positions)
