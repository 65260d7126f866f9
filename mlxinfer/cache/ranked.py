"""Latent attention to the tokens that an indexer ranks highest: DeepSeek Sparse Attention.

n = queries of one sequence, S = its tokens, H and Hi = heads of attention and of the indexer, di =
numbers of an index key. A token ranks by the sum over heads of weight * max(query · key, 0). Of
equal ranks the earlier token counts: references leave that to their top-k: its order among equals
is not defined, and here it must not depend on how a step was cut.
Source: DeepSeek-V3.2, arXiv 2512.02556.
"""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..core import LatentSpec
from .formats import PLAIN, Bits, make_format
from .inputs import Ints
from .latent import LatentPool, LatentProjection, LatentStep
from .pool import Plane, Stored
from .step import GroupPlan, write_step

MOST_SCORES = 1 << 26  # scores that are there at once


Index = tuple[mx.array, mx.array, mx.array]
"""Of the T tokens of a step: queries (T, Hi, di) and keys (T, di), both position-encoded, and
between them weights (T, Hi)."""


class RankedPool(LatentPool):
    """Pages and tails of one layer: latent vectors, and index keys in a plane of their own.

    Index keys stay in the activations' dtype: fewer bits would choose other tokens.
    """

    def __init__(
        self,
        spec: LatentSpec,
        *,
        page_size: int,
        num_pages: int,
        num_slots: int,
        dtype: mx.Dtype,
        bits: Bits = PLAIN,
    ) -> None:
        """Arguments as of `LatentPool`."""
        self.index_format = make_format(spec.index_dim, dtype, None)
        super().__init__(
            spec,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
            dtype=dtype,
            bits=bits,
            more=[self.index_format],
        )
        self.num_ranked = spec.num_ranked

    def step(self, plan: GroupPlan, *, tiles: bool) -> "RankedStep":
        """As of `LatentPool`."""
        return RankedStep(self, plan, tiles=tiles)

    def encode_index(self, keys: mx.array) -> Stored:
        """What is stored of index keys (T, di)."""
        return [self.index_format.encode(keys[:, None])]

    def read_whole(self, plane: Plane, one: "Sequence") -> mx.array:
        """(S, D) of all tokens of a sequence, in order."""
        parts = [plane.read_runs(one.runs)] if one.runs else []
        if len(one.tail):
            tail = plane.fmt.decode([part[one.slot] for part in plane.own_tails()])
            parts.append(tail[:, mx.array(one.tail)])
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1))[0]


class RankedStep(LatentStep):
    """One layer's cache during one step.

    Where no sequence is longer than the number of tokens that one sees, all are seen.
    """

    __slots__ = ()
    _pool: RankedPool

    def attend(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        *,
        projection: LatentProjection,
        scale: float,
        index: Index | None = None,
    ) -> mx.array:
        """As of `LatentStep`; index: of the same tokens."""
        assert index is not None
        pool, plan = self._pool, self.plan
        write_step(pool, plan, pool.encode(latent, k_rope) + pool.encode_index(index[2]))
        if int(plan.segments.positions.max()) < pool.num_ranked:
            return self._read(q_nope, q_rope, projection, scale)
        absorbed = pool.rotate(projection.absorb(q_nope))
        queries = mx.concatenate([absorbed, q_rope], axis=-1)  # (T, H, r + dr)
        sums = attend_ranked(pool, plan, queries, index, scale=scale)
        return projection.value(pool.rotate(sums))


class Sequence(NamedTuple):
    """The tokens of one sequence in a step, and where all of its tokens lie."""

    rows: slice  # of the flat list
    start: int  # position of the first
    runs: list[tuple[int, int]]  # pool slots of what is in pages
    slot: int  # of the tail
    tail: Ints  # offsets there of what follows, in order


def sequences_of(plan: GroupPlan, page_size: int) -> Iterator[Sequence]:
    """All sequences of a step, in the order of the flat list."""
    ring, nothing = 2 * page_size, np.zeros(0, np.int32)
    for short in plan.segments.short:
        parts = zip(
            *(part.tolist() for part in (short.rows, short.starts, short.counts)),
            *(part.tolist() for part in (short.sealed, short.slots)),
            short.tables,
            strict=True,
        )
        for row, start, count, sealed, slot, tables in parts:
            tail = np.arange(sealed, start + count, dtype=np.int32) % ring
            runs = tables[plan.group].runs(0, sealed)
            yield Sequence(slice(row, row + count), start, runs, slot, tail)
    for chunk in plan.long:
        yield Sequence(chunk.rows, chunk.start, chunk.reads, 0, nothing)


def attend_ranked(
    pool: RankedPool, plan: GroupPlan, queries: mx.array, index: Index, *, scale: float
) -> mx.array:
    """Queries (T, H, r + dr) of latent vectors -> weighted sums of latents (T, H, r)."""
    outputs: list[mx.array] = []
    rows: list[Ints] = []
    rankers, weights, _ = index
    for one in sequences_of(plan, pool.page_size):
        vectors, keys = (pool.read_whole(plane, one) for plane in pool.planes)  # (S, ...)
        values = vectors[None, None, :, : pool.latent_dim]
        heads = max(queries.shape[1], rankers.shape[1])
        block = max(1, MOST_SCORES // (heads * len(vectors)))
        for first in range(one.rows.start, one.rows.stop, block):
            own = slice(first, min(first + block, one.rows.stop))
            some = queries[own].swapaxes(0, 1)[None]  # (1, H, n, r + dr)
            if outputs:
                some = mx.depends(some, outputs[-1])  # one block's scores at a time
            position = one.start + first - one.rows.start
            seen = ranked(rankers[own], weights[own], keys, position, pool.num_ranked)
            found = mx.fast.scaled_dot_product_attention(
                some, vectors[None, None], values, scale=scale, mask=seen
            )
            outputs.append(found[0].swapaxes(0, 1))
            rows.append(np.arange(own.start, own.stop, dtype=np.int32))
    order = np.argsort(np.concatenate(rows))
    return mx.concatenate(outputs)[mx.array(order)]


def ranked(
    queries: mx.array, weights: mx.array, keys: mx.array, position: int, count: int
) -> mx.array:
    """(n, S) whether a token is among the `count` best of those up to the query's own.

    Args:
        queries: (n, Hi, di), the first at `position`.
        weights: (n, Hi).
        keys: (S, di) from position 0 on.
        position: of the first query.
        count: tokens that are seen.
    """
    places = mx.arange(len(keys))
    visible = places <= position + mx.arange(len(queries))[:, None]  # (n, S)
    if len(keys) <= count:
        return visible
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).T  # (n, Hi, S)
    ranks = (weights.astype(mx.float32)[:, None] @ mx.maximum(scores, 0.0))[:, 0]
    ranks = mx.where(visible, ranks, -mx.inf)
    lowest = mx.min(mx.topk(ranks, count, axis=-1), axis=-1, keepdims=True)
    above = ranks > lowest
    equal = (ranks == lowest) & visible
    room = count - mx.sum(above, axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
