"""A prefill chunk attends over its pages, a block of queries at a time. Knows no queue."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .pool import LayerPool
from .segments import QuerySegment
from .window import AttentionWindow

QUERY_BLOCK = 128  # prefill queries at a time where attention materialises its scores,
MIN_QUERY_BLOCK = 16
MAX_SCORES = 1 << 19  # fewer where keys are many: as many scores a head at once


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries of a prefill chunk, and the keys that they can see."""

    queries: slice  # of the chunk's rows
    keys: slice  # of what the chunk reads
    mask: mx.array | str  # "causal", or bool (queries, keys)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One prefill chunk."""

    rows: slice  # of the step's flat list
    writes: list[tuple[int, int]]  # pool slots of the new tokens
    reads: list[tuple[int, int]]  # pool slots of all that any of them sees
    blocks: list[Block]

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of the chunk see, (n, heads * V)."""
        keys = pool.keys.read_runs(self.reads)
        values = pool.values.read_runs(self.reads, after=keys)  # never both half decoded
        chunk = queries[self.rows].swapaxes(0, 1)  # (heads, n, D)
        outputs: list[mx.array] = []
        for block in self.blocks:
            some = chunk[None, :, block.queries]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    mx.depends(some, outputs[-1]) if outputs else some,  # one block's scores only
                    keys[None, :, block.keys],
                    values[None, :, block.keys],
                    scale=scale,
                    mask=block.mask,
                    sinks=sinks,
                )
            )
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return joined[0].swapaxes(0, 1).flatten(1)  # (n, heads * V)


def plan_chunk(segment: QuerySegment, group: int, window: AttentionWindow) -> ChunkPlan:
    """Plan one chunk for layer group `group`."""
    # What of its first page is there already was copied into the page as well as into the tail.
    assert segment.sealed == segment.start - segment.start % segment.tables[group].page_size, (
        "a full page is not sealed"
    )
    table = segment.tables[group]
    ranges = window.ranges(segment.start, segment.stop)
    return ChunkPlan(
        rows=slice(segment.row, segment.row + segment.num_tokens),
        writes=table.runs(segment.start, segment.stop),
        reads=[run for part in ranges for run in table.runs(*part)],
        blocks=_query_blocks(segment, ranges, window),
    )


def _query_blocks(
    segment: QuerySegment, ranges: Sequence[tuple[int, int]], window: AttentionWindow
) -> list[Block]:
    """Blocks of queries with the keys that they can see, so that no score matrix is larger.

    MLX's fused attention on Metal keeps no scores: without a window one block is best there.
    """
    whole = mx.metal.is_available() and window.size is None
    num_keys = sum([stop - start for start, stop in ranges])
    fitting = max(MIN_QUERY_BLOCK, min(QUERY_BLOCK, MAX_SCORES // num_keys))
    width = segment.num_tokens if whole else fitting
    keys = np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in ranges])
    blocks = []
    for first in range(0, segment.num_tokens, width):
        last = min(first + width, segment.num_tokens)
        queries = np.arange(segment.start + first, segment.start + last, dtype=np.int32)
        seen = window.sees(queries[[0, -1], None], keys[None])  # an old end leaves, a new one comes
        columns = np.flatnonzero(seen.any(axis=0))
        low, high = int(columns[0]), int(columns[-1]) + 1
        mask: mx.array | str = "causal"
        if not seen[1, low:high].all():
            mask = mx.array(window.sees(queries[:, None], keys[None, low:high]))
        blocks.append(Block(slice(first, last), slice(low, high), mask))
    return blocks
