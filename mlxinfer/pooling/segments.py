"""Attention within the rows of one pass: nothing is kept, so nothing is paged.

n = rows of one length, L = that length, H = KV heads, D = head dim. Rows of equal length stand side
by side in the flat list, so that they attend together as a view (n, heads, L, D), without padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..cache_specs import CacheSpec, KVSpec, StateSpec
from ..errors import UnsupportedModelError
from ..layers.step import Advance, Arrays
from ..metal_kernels.chips import FUSED_DIMS
from ..metal_kernels.paged_attention import Softmax

MAX_SCORES = 1 << 24  # numbers of a block of scores, where attention materialises them
QUERY_BLOCK = 256  # queries of a long row at a time
Mask = mx.array | str | None  # (queries, keys) bool, or "causal"; None: all see all


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows of one length within a pass."""

    start: int  # of the first token, in the flat list
    count: int
    length: int

    def of(self, x: mx.array) -> mx.array:
        """x (T, ...) -> (count, length, ...) of these rows."""
        rows = x[self.start : self.start + self.count * self.length]
        return rows.reshape(self.count, self.length, *x.shape[1:])


def row_groups(lengths: Sequence[int]) -> list[RowGroup]:
    """Groups of the rows of a pass, in order of their lengths."""
    groups, start = [], 0
    for length, rows in groupby(lengths):
        count = len(list(rows))
        groups.append(RowGroup(start, count, length))
        start += count * length
    return groups


class Masks:
    """Which tokens of a row see which, made once for all layers of a pass."""

    def __init__(self, bidirectional: bool) -> None:
        self.bidirectional = bidirectional
        self._made: dict[tuple[int, int, int, int, int | None], mx.array] = {}

    def of(self, queries: tuple[int, int], keys: tuple[int, int], window: int | None) -> Mask:
        """Of two ranges of positions. Causal ones are MLX's own: for a row of 32,768 tokens an
        array would take gigabytes.
        """
        first, last = queries[0], queries[1] - 1
        sees_ahead = self.bidirectional or keys[1] - 1 <= first
        if sees_ahead and (
            window is None or (last - keys[0] < window and (keys[1] - 1 - first < window))
        ):
            return None
        if not self.bidirectional and window is None:
            return "causal"
        key = (*queries, *keys, window)
        if key not in self._made:
            distance = mx.arange(*queries)[:, None] - mx.arange(*keys)[None]
            seen = mx.ones(distance.shape, mx.bool_) if self.bidirectional else distance >= 0
            if window is not None:
                seen = seen & (mx.abs(distance) < window)
            self._made[key] = seen
        return self._made[key]

    def keys(self, queries: tuple[int, int], length: int, window: int | None) -> tuple[int, int]:
        start = 0 if window is None else max(queries[0] - window + 1, 0)
        if not self.bidirectional:
            return start, queries[1]
        return start, length if window is None else min(queries[1] + window - 1, length)


class SegmentAttention:
    """Takes the place of the KV cache of one attention layer in a pass.

    Args:
        window: positions that a token sees, itself included; where tokens see ahead, to each side.
    """

    __slots__ = ("_groups", "_masks", "_stored", "_window", "step_head_writer")

    def __init__(self, groups: Sequence[RowGroup], masks: Masks, window: int | None) -> None:
        self._groups = groups
        self._masks = masks
        self._window = window
        self._stored: tuple[mx.array, mx.array] | None = None
        self.step_head_writer = None  # no kernel stores keys and values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        softmax: Softmax,
        choice: None = None,
        rows: None = None,
    ) -> mx.array:
        """queries (T, heads, D), keys (T, H, D), values (T, H, V) -> (T, heads * V).

        `choice` and `rows`: no index chooses here, and all rows attend.
        """
        self._stored = keys, values
        return self.attend_again(queries, softmax, rows)

    def attend_again(self, queries: mx.array, softmax: Softmax, rows: None) -> mx.array:
        """Other queries (T, heads, D) over the same keys and values."""
        assert self._stored is not None
        keys, values = self._stored
        outputs = [self._of_group(group, queries, keys, values, softmax) for group in self._groups]
        return mx.concatenate(outputs)

    def _of_group(
        self, group: RowGroup, queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax
    ) -> mx.array:
        """All of the pass (T, ...) -> what tokens of one group see, (n * L, heads * V)."""
        queries, keys, values = (
            group.of(x).swapaxes(1, 2)
            for x in (queries, keys, values)  # (n, heads, L, D)
        )
        count, heads, length, dim = queries.shape
        keeps_scores = not (mx.metal.is_available() and dim in FUSED_DIMS)
        block, rows = length, count
        if keeps_scores or self._window is not None:
            block = min(length, max(QUERY_BLOCK, MAX_SCORES // (heads * length)))
            rows = max(1, MAX_SCORES // (heads * block * length))
        parts = []
        for first in range(0, count, rows):
            some_rows = slice(first, first + rows)
            blocks = []
            for start in range(0, length, block):
                span = start, min(start + block, length)
                seen = self._masks.keys(span, length, self._window)
                mask = self._masks.of(span, seen, self._window)
                blocks.append(
                    attention(
                        softmax,
                        queries[some_rows, :, span[0] : span[1]],
                        keys[some_rows, :, seen[0] : seen[1]],
                        values[some_rows, :, seen[0] : seen[1]],
                        mask,
                    )
                )
            parts.append(mx.concatenate(blocks, axis=2))
        attended = mx.concatenate(parts)
        return attended.swapaxes(1, 2).reshape(count * group.length, -1)


def attention(
    softmax: Softmax, queries: mx.array, keys: mx.array, values: mx.array, mask: Mask
) -> mx.array:
    """Attention of (n, heads, l, D) over (n, H, S, D) and (n, H, S, V), and a mask (l, S)."""
    if softmax.soft_cap is None:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=softmax.scale, mask=mask, sinks=softmax.sinks
        )
    assert softmax.sinks is None
    count, heads, length, dim = queries.shape
    grouped = queries.reshape(count, keys.shape[1], -1, dim)  # (n, H, heads / H * l, D)
    scores = (grouped * softmax.scale) @ keys.swapaxes(2, 3)
    scores = mx.tanh(scores / softmax.soft_cap) * softmax.soft_cap
    scores = scores.reshape(count, heads, length, -1)
    if isinstance(mask, str):
        stop = keys.shape[2]
        mask = mx.arange(stop - length, stop)[:, None] >= mx.arange(stop)[None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True)
    mixed = weights.reshape(count, keys.shape[1], -1, keys.shape[2]) @ values
    return mixed.reshape(count, heads, length, -1)


class SegmentStates:
    """Takes the place of the states of a recurrent layer: every row begins with zeros."""

    __slots__ = ("_groups", "_spec")

    def __init__(self, groups: Sequence[RowGroup], spec: StateSpec) -> None:
        self._groups = groups
        self._spec = spec

    def recur(self, rows: Arrays, advance: Advance) -> mx.array:
        """Let a recurrence go over inputs (T, ...); outputs (T, D)."""
        flat = []
        for group in self._groups:
            read = partial(self._zeros, group.count)
            y, _ = advance([group.of(x) for x in rows], read, _no_places)
            flat.append(y.flatten(0, 1))
        return mx.concatenate(flat)

    def _zeros(self, count: int) -> tuple[Arrays, None]:
        """The states before the first tokens of `count` rows, all of which count."""
        shapes = self._spec.shapes
        return [mx.zeros((count, *shape), getattr(mx, dtype)) for shape, dtype in shapes], None


def _no_places() -> Any:
    raise AssertionError("kernels without an engine")


SegmentCache = SegmentAttention | SegmentStates


def segment_cache(spec: CacheSpec, groups: Sequence[RowGroup], masks: Masks) -> SegmentCache:
    """Takes the place of a mixer's cache in a pass.

    Raises:
        UnsupportedModelError: a mixer that has none here.
    """
    return SEGMENT_CACHES.get(type(spec), _none)(spec, groups, masks)


def _attention(spec: KVSpec, groups: Sequence[RowGroup], masks: Masks) -> SegmentCache:
    return (
        _none(spec, groups, masks) if spec.chunked else SegmentAttention(groups, masks, spec.window)
    )


def _states(spec: StateSpec, groups: Sequence[RowGroup], masks: Masks) -> SegmentCache:
    return SegmentStates(groups, spec)


def _none(spec: CacheSpec, groups: Sequence[RowGroup], masks: Masks) -> SegmentCache:
    raise UnsupportedModelError(
        f"Models with {type(spec).__name__} layers give no embeddings and scores here; those of "
        "full or windowed attention, and recurrent ones, do."
    )


SEGMENT_CACHES: dict[type, Callable[[Any, Sequence[RowGroup], Masks], SegmentCache]] = {
    KVSpec: _attention,
    StateSpec: _states,
}
