"""The plan of a step's prompts: tiles of consecutive queries, each with the blocks that it sees.

One launch of the paged attention kernel serves the chunks of several sequences, where MLX has no
fused attention (head dims above 128 for more than 8 queries) and where keys and values are stored
in codes: nothing is gathered, no score leaves a threadgroup, and what a launch takes beside its
outputs does not grow with the context. Algorithm: FlashAttention-2, arXiv:2307.08691.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .attention_plan import (
    ENDLESS,
    MIN_ITEM_BLOCKS,
    TABLE,
    AttentionPlan,
    Ints,
    plan_numbers,
    share_blocks,
    visible_blocks,
)
from .attention_shape import prefill_shape
from .chips import gpu_cores
from .stored import Stored

TILES_PER_CORE = 2  # threadgroups below which long tiles are split
MAX_PARTIAL_BYTES = 2 << 20  # that split tiles may leave to be reduced


@dataclass(frozen=True, slots=True)
class Chunks:
    """B segments of a step, each of some consecutive tokens of one sequence.

    Attributes:
        rows: (B,) of their first queries in the flat list, in order, one after another.
        starts: (B,) positions of these.
        counts: (B,) query tokens.
        sealed: (B,) positions that lie in pages, whole pages or all; the rest lies in the tail.
        slots: (B,) of the tails.
        pages: (B, max_pages) as `page_table` gives them.
        page_size: tokens a page, a multiple of 16.
        window: positions up to a query that it sees; None: all.
        sinks: positions at the front that every query sees beside its window.
    """

    rows: Ints
    starts: Ints
    counts: Ints
    sealed: Ints
    slots: Ints
    pages: mx.array
    page_size: int
    window: int | None = None
    sinks: int = 0

    def plan(
        self,
        tile_queries: int,
        *,
        kv_heads: int,
        partial_bytes: int,
        cores: int | None = None,
        item_blocks: int | None = None,
        most_blocks: int | None = None,
    ) -> AttentionPlan:
        """Tiles of at most `tile_queries` queries, those with most keys first.

        Where tiles are too few for the GPU they are split, as far as partial outputs stay small:
        nothing that a plan leads to grows with the context.

        Args:
            tile_queries: query tokens of a threadgroup.
            kv_heads: of a layer.
            partial_bytes: of one item's partial outputs, all heads together.
            cores: of the GPU; None: those of this machine.
            item_blocks: blocks of one threadgroup at most; None: from tiles and cores.
            most_blocks: blocks of keys that there are, where queries come later; None: all that
                they see. There must be no window.
        """
        num_tiles = -(-self.counts // tile_queries)
        chunk = np.repeat(np.arange(len(self.counts)), num_tiles)
        index = np.arange(len(chunk)) - (np.cumsum(num_tiles) - num_tiles)[chunk]
        first = (index * tile_queries).astype(np.int32)  # queries of the chunk before the tile
        starts = self.starts[chunk] + first
        stops = np.minimum(starts + tile_queries, (self.starts + self.counts)[chunk])
        sink_blocks, gaps, num_blocks = visible_blocks(starts, stops, self.window, self.sinks)
        if most_blocks is not None:
            num_blocks = np.minimum(num_blocks, most_blocks)
        order = np.argsort(-num_blocks, kind="stable")
        if item_blocks is None:
            cores = cores or gpu_cores()
            item_blocks = _item_blocks(num_blocks, kv_heads, partial_bytes, cores)
        first_items, work = share_blocks(num_blocks[order], item_blocks)
        work[:, TABLE] = chunk[order][work[:, 0]]
        fields = self.rows[chunk] + first, starts, stops, self.sealed[chunk], self.slots[chunk]
        spans = np.stack([field[order] for field in (*fields, sink_blocks, gaps)], axis=1)
        spans = np.concatenate([spans, first_items[:, None]], axis=1).astype(np.int32)
        reach = (ENDLESS, 0) if self.window is None else (self.window, self.sinks)
        sizes = self.page_size, *reach, self.pages.shape[1], tile_queries
        return AttentionPlan(
            mx.array(plan_numbers(sizes, spans, work)),
            self.pages,
            len(spans),
            len(work),
            tile_queries,
            int(self.counts.sum()),
            is_prefill=True,
        )


def _item_blocks(num_blocks: Ints, kv_heads: int, partial_bytes: int, cores: int) -> int:
    """Blocks that one threadgroup takes at most."""
    whole = int(num_blocks.max())
    wanted = TILES_PER_CORE * cores // kv_heads
    allowed = MAX_PARTIAL_BYTES // partial_bytes
    spare = min(wanted, allowed) - len(num_blocks)  # tiles may have one item more than their share
    if spare < 1:
        return whole
    return max(-(-int(num_blocks.sum()) // spare), MIN_ITEM_BLOCKS)


def tiled(chunks: Chunks, queries: mx.array, keys: Stored, value_dim: int) -> AttentionPlan:
    """The plan of chunks for a layer with such queries (T, heads, D), keys and values.

    Raises:
        ValueError: a tile has no room for the query heads of one token.
    """
    _, num_heads, key_dim = queries.shape
    kv_heads = keys.pages[0].shape[0]
    count = tile_queries(num_heads // kv_heads, key_dim=key_dim, value_dim=value_dim)
    if count == 0:
        raise ValueError(f"{num_heads // kv_heads} query heads of a KV head do not fit a tile")
    rows = count * (num_heads // kv_heads)
    partial_bytes = kv_heads * rows * (value_dim + 2) * 4
    return chunks.plan(count, kv_heads=kv_heads, partial_bytes=partial_bytes)


def tile_queries(group: int, *, key_dim: int, value_dim: int) -> int:
    """Query tokens of a tile, for `group` query heads per KV head."""
    return prefill_shape(key_dim=key_dim, value_dim=value_dim).rows // group
