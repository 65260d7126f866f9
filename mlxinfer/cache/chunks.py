"""One prefill chunk in plain MLX: it reads pages alone, at once or in blocks.

n = query tokens of a chunk, H = KV heads, S = keys that a chunk reads, V = value dim.

MLX's fused attention on Metal keeps no scores. It takes more than 8 queries at head dims up to 128
(`FUSED_DIMS`). At 192 and 256 it has kernels, but MLX prefers to materialise the scores, except in
one case on the newest GPUs (mlx/backend/metal/scaled_dot_product_attention.cpp, 0.32.2). All other
attention is done in blocks of queries and keys. Then neither the scores nor the decoded part of the
cache grow with the context. With several blocks of keys, the softmax is updated block by block
(FlashAttention-2, arXiv:2307.08691).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.chips import FUSED_DIMS
from ..metal_kernels.gathered_attention import capped
from ..metal_kernels.paged_attention import QUERY_BLOCK, Softmax
from ..metal_kernels.stored import Runs
from .inputs import Ints, Segments, StepMetadata, ints
from .paged import PagedLayer
from .pages import AttentionWindow, PageGroup

KEY_BLOCK = 2048
LOWEST = -1e30  # a peak before anything was seen

KeysValues = tuple[mx.array, mx.array]
Read = Callable[[int, int, mx.array | None], KeysValues]  # keys from, to; not before this is there
Block = tuple[slice, slice, mx.array | str]
"""Some rows of a chunk, the keys that they can see among those that the chunk reads, and which of
these: "causal", or bool (queries, keys)."""

Running = tuple[mx.array, mx.array, mx.array]
"""A softmax over the keys so far, of H heads and some rows of each, float32: outputs (H, rows, V)
that are not divided by the totals, peaks (H, rows, 1) and totals (H, rows, 1)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill chunk: where its tokens go, and what they see.

    Attributes:
        rows: of the step's flat list.
        writes: page slots of the new tokens.
        reads: page slots of all that any of them sees.
        start: position of the first token.
        ranges: positions of `reads`, in order.
        window: of the group.
        spans: (2, n) positions from, and up to, of the span of each token; None: all are alone.
    """

    rows: slice
    writes: list[tuple[int, int]]
    reads: list[tuple[int, int]]
    start: int
    ranges: Sequence[tuple[int, int]]
    window: AttentionWindow
    spans: Ints | None = None
    _blocks: list[Block] = field(default_factory=list)  # of queries, where keys are one block

    @staticmethod
    def of(segment: Segments, metadata: StepMetadata, group: PageGroup) -> "Chunk":
        row, start, count = int(segment.rows[0]), int(segment.starts[0]), segment.num_tokens
        table, window, stop = segment.tables[0][group.number], group.window, start + count
        # What of its first page is there already was copied into the page as well as into the tail.
        assert segment.sealed[0] == start - start % table.page_size, "a full page is not sealed"
        ranges = window.ranges(start, stop)
        return Chunk(
            rows=slice(row, row + count),
            writes=table.runs(start, stop),
            reads=[run for part in ranges for run in table.runs(*part)],
            start=start,
            ranges=ranges,
            window=window,
            spans=metadata.spans_of(row, count),
        )

    @property
    def num_keys(self) -> int:
        """Tokens that any query sees."""
        return sum([stop - start for start, stop in self.ranges])

    @property
    def sees_all_before(self) -> bool:
        """Whether each token sees exactly itself and all tokens before it."""
        return self.window.size is None and self.spans is None

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Attention of queries (n, heads, D), (n, heads * V)."""

        def read(start: int, stop: int, after: mx.array | None) -> KeysValues:
            runs = cut_runs(self.reads, start, stop)
            keys = layer.keys.read_runs(runs, after)
            return keys, layer.values.read_runs(runs, after=keys)  # never both half decoded

        dims = queries.shape[-1], layer.values.read_dim
        output = self.attend_to(queries.swapaxes(0, 1), read, dims, softmax)
        return output.swapaxes(0, 1).flatten(1)

    def attend_to(
        self, queries: mx.array, read: Read, dims: tuple[int, int], softmax: Softmax
    ) -> mx.array:
        """Queries (heads, n, D) of the chunk over what it reads.

        Args:
            queries: of the chunk.
            read: tokens from, to, counted in `reads`, and what must be there before -> their keys
                (H, S, D) and values (H, S, V).
            dims: D and V.
            softmax: of the layer.

        Returns:
            (heads, n, V).
        """
        scale, sinks, soft_cap = softmax
        if (
            self.sees_all_before
            and soft_cap is None
            and mx.metal.is_available()
            and is_fused(*dims)
        ):
            keys, values = read(0, self.num_keys, None)
            output = mx.fast.scaled_dot_product_attention(
                queries[None], keys[None], values[None], scale=scale, mask="causal", sinks=sinks
            )
            return output[0]
        if self.num_keys <= KEY_BLOCK and soft_cap is None:
            return self._over_one_block(queries, read, scale, sinks)
        return self._over_blocks(queries * scale, read, sinks, soft_cap)

    def _over_one_block(
        self, queries: mx.array, read: Read, scale: float, sinks: mx.array | None
    ) -> mx.array:
        keys, values = read(0, self.num_keys, None)
        if not self._blocks:
            self._blocks.extend(self._query_blocks())
        outputs: list[mx.array] = []
        for rows, columns, mask in self._blocks:
            some = queries[None, :, rows]
            some = mx.depends(some, outputs[-1]) if outputs else some  # one block's scores only
            seen = keys[None, :, columns], values[None, :, columns]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    some, *seen, scale=scale, mask=mask, sinks=sinks
                )
            )
        return outputs[0][0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)[0]

    def _over_blocks(
        self, queries: mx.array, read: Read, sinks: mx.array | None, soft_cap: float | None
    ) -> mx.array:
        """Each block of keys is read once, for all queries; `queries` are scaled."""
        num_heads, count, _ = queries.shape
        places = [
            slice(first, min(first + QUERY_BLOCK, count)) for first in range(0, count, QUERY_BLOCK)
        ]
        states: list[Running | None] = [None] * len(places)
        positions, after = self._key_positions(), None
        for start in range(0, len(positions), KEY_BLOCK):
            key_positions = positions[start : start + KEY_BLOCK]
            keys, values = read(start, start + len(key_positions), after)
            for i, place in enumerate(places):
                seen = self._seen(place, key_positions)
                if seen is False:
                    continue
                state = states[i] or _begun(queries[:, place], values, sinks)
                some = queries[:, place] if after is None else mx.depends(queries[:, place], after)
                states[i] = state = _joined(state, some, keys, values, seen, soft_cap)
                after = state[0]
        outputs = [state[0] / state[2] for state in states if state is not None]
        return mx.concatenate(
            [some.reshape(num_heads, -1, some.shape[-1]) for some in outputs], axis=1
        ).astype(queries.dtype)

    def _key_positions(self) -> Ints:
        """(S,) of what is read."""
        return np.concatenate([np.arange(*part, dtype=np.int32) for part in self.ranges])

    def _visible(self, place: slice, keys: Ints) -> NDArray[np.bool_]:
        """(queries, keys) which of some queries see which keys (S,), by position."""
        queries = np.arange(self.start + place.start, self.start + place.stop, dtype=np.int32)
        spans = None if self.spans is None else self.spans[:, place, None]
        return self.window.sees(queries[:, None], keys[None], spans)

    def _seen(self, place: slice, keys: Ints) -> mx.array | bool:
        """Which of some queries see which keys: (queries, keys) bool, or all, or none of them."""
        first, last = self.start + place.start, self.start + place.stop - 1
        if self.window.size is None and keys[-1] <= first:
            return True
        if self.spans is None and keys[0] > last:
            return False
        seen = self._visible(place, keys)
        return mx.array(seen) if seen.any() else False

    def _query_blocks(self) -> list[Block]:
        keys, count = self._key_positions(), self.rows.stop - self.rows.start
        blocks = []
        for first in range(0, count, QUERY_BLOCK):
            queries = slice(first, min(first + QUERY_BLOCK, count))
            if self.spans is None:  # an old end leaves, a new one comes
                edges = ints([self.start + queries.start, self.start + queries.stop - 1])
                seen = self.window.sees(edges[:, None], keys[None])
            else:
                seen = self._visible(queries, keys)
            columns = np.flatnonzero(seen.any(axis=0))
            low, high = int(columns[0]), int(columns[-1]) + 1
            mask: mx.array | str = "causal"
            if self.spans is not None or not seen[-1, low:high].all():
                mask = mx.array(self._visible(queries, keys[low:high]))
            blocks.append((queries, slice(low, high), mask))
        return blocks


def is_fused(key_dim: int, value_dim: int) -> bool:
    """Whether MLX on Metal attends to keys and values of these dims without keeping scores."""
    return key_dim == value_dim and key_dim in FUSED_DIMS


def cut_runs(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The runs that hold tokens [start, stop) of those in `runs`, counted one after another."""
    cut, first = [], 0
    for low, high in runs:
        begin, end = max(low, low + start - first), min(high, low + stop - first)
        if begin < end:
            cut.append((begin, end))
        first += high - low
    return cut


def _begun(queries: mx.array, values: mx.array, sinks: mx.array | None) -> Running:
    """The running softmax before any key. A sink logit is already in it."""
    num_heads, count, _ = queries.shape
    kv_heads, _, dim = values.shape
    shape = kv_heads, num_heads // kv_heads * count, 1
    outputs = mx.zeros((*shape[:2], dim), mx.float32)
    if sinks is None:
        return outputs, mx.full(shape, LOWEST), mx.zeros(shape, mx.float32)
    peaks = mx.repeat(sinks.astype(mx.float32), count).reshape(shape)
    return outputs, peaks, mx.ones(shape, mx.float32)


def _joined(
    state: Running,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array | bool,
    soft_cap: float | None,
) -> Running:
    """The running softmax after more keys.

    Queries (heads, n, D), keys (H, S, D), values (H, S, V).
    """
    kv_heads, num_keys, _ = keys.shape
    _, count, dim = queries.shape
    outputs, old_peaks, old_totals = state
    scores = queries.reshape(kv_heads, -1, dim) @ keys.swapaxes(1, 2)
    scores = (scores if soft_cap is None else capped(scores, soft_cap)).astype(mx.float32)
    if isinstance(seen, mx.array):
        by_query = scores.reshape(kv_heads, -1, count, num_keys)
        scores = mx.where(seen, by_query, -mx.inf).reshape(scores.shape)
    peaks = mx.maximum(old_peaks, scores.max(axis=-1, keepdims=True))
    weights, fade = mx.exp(scores - peaks), mx.exp(old_peaks - peaks)
    added = weights.astype(values.dtype) @ values
    totals = old_totals * fade + weights.sum(axis=-1, keepdims=True)
    # Else totals wait for the last block, and the weights of all blocks with them.
    return mx.depends(outputs * fade + added, totals), peaks, totals
