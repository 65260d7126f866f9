"""Latent attention (MLA) over the cache: one vector a token, attended absorbed or expanded.

r = latent_dim, dr = rope_dim, H = query heads, dn and dv = dims of a head's keys (without their
rotary part) and values, T = tokens of the step. A token's vector is its latent (r), then its rotary
key (dr), under one head. Source: DeepSeek-V2, arXiv:2405.04434.

Short segments attend *absorbed*: the projections are applied to queries and outputs, so all heads
attend to the stored vectors; their first r numbers are the values too. A prefill chunk attends
*expanded*: the latents of one layer become keys and values of every head, which costs less
arithmetic where queries are many, and suits fused attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..core import LatentSpec
from ..metal_kernels.attention_plan import AttentionPlan, AttentionPlanner, page_table
from ..metal_kernels.mla_attention import mla_attention_on_metal, row_blocks
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.prefill_blocks import attend_in_tiles
from .chunk_attention import ChunkPlan, cut_runs
from .formats import PLAIN, Bits, KVFormat, make_format
from .groups import AttentionWindow
from .inputs import Segments
from .pool import PagePool, Runs, Stored
from .step import GroupPlan, Part, write_step


class LatentProjection(Protocol):
    """The up-projections of one latent attention layer; N and S count tokens."""

    @property
    def value_dim(self) -> int:
        """dv, the numbers of a value."""
        ...

    def absorb(self, q_nope: mx.array) -> mx.array:
        """Queries (N, H, dn) -> (N, H, r), to be multiplied with latents."""
        ...

    def value(self, latents: mx.array) -> mx.array:
        """Weighted sums of latents (N, H, r) -> values (N, H, dv)."""
        ...

    def expand(self, latents: mx.array) -> tuple[mx.array, mx.array]:
        """Latents (S, r) -> keys (S, H, dn) and values (S, H, dv)."""
        ...


class LatentPool(PagePool):
    """Pages and tails of one latent attention layer: one plane under one head, or `more` of them.

    With 4 bits the latent part, not the rotary one, is multiplied by a Hadamard matrix before it is
    stored: outliers of single channels are spread over all. The matrix is its own inverse, as
    `lay_out` allows powers of two only.
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
        more: Sequence[KVFormat] = (),
    ) -> None:
        super().__init__(
            [make_format(spec.latent_dim + spec.rope_dim, dtype, bits[0]), *more],
            heads=1,
            joined=False,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
        )
        self.latent_dim = spec.latent_dim
        self.form = (spec.latent_dim, spec.rope_dim, bits)
        self._rotates = bits[0] == 4
        self.keys = self.planes[0]
        self.values = self.keys.cut(0, spec.latent_dim)

    def rotate(self, latents: mx.array) -> mx.array:
        """(..., r) to or from the basis in which latents are stored."""
        return mx.hadamard_transform(latents) if self._rotates else latents

    def step(self, plan: GroupPlan, *, tiles: bool) -> "LatentStep":
        """The layer's cache during one step; `tiles` as of `LatentStep`."""
        return LatentStep(self, plan, tiles=tiles)

    def encode(self, latents: mx.array, k_rope: mx.array) -> Stored:
        """What is stored of latents (T, r) and rotary keys (T, dr)."""
        vectors = mx.concatenate([self.rotate(latents), k_rope], axis=-1)
        return [self.keys.fmt.encode(vectors[:, None])]

    def read_tails(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """Vectors (B, 1, 2 * P, r + dr) and values (B, 1, 2 * P, r) of the tails `slots` (B,)."""
        vectors = self.keys.fmt.decode([part[slots] for part in self.keys.own_tails()])
        return vectors, vectors[..., : self.latent_dim]

    def read_runs(self, runs: Runs, after: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Latents (S, r) and rotary keys (S, dr) of several runs, read not before `after`."""
        vectors = self.keys.read_runs(runs, after)[0]
        return self.rotate(vectors[:, : self.latent_dim]), vectors[:, self.latent_dim :]


class LatentStep:
    """One latent attention layer's cache during one step.

    Args:
        pool: of the layer.
        plan: of the step.
        tiles: prefill chunks that see everything attend through the kernel for prompts.
    """

    __slots__ = ("_pool", "_tiles", "plan")

    def __init__(self, pool: LatentPool, plan: GroupPlan, *, tiles: bool = False) -> None:
        self._pool = pool
        self._tiles = tiles
        self.plan = plan  # of the current step

    def attend(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        *,
        projection: LatentProjection,
        scale: float,
    ) -> mx.array:
        """Store this step's vectors, then attend over all that each token may see.

        Args:
            q_nope: (T, H, dn) the queries' part without rope.
            q_rope: (T, H, dr) their rotary part, position-encoded.
            latent: (T, r) compressed keys and values, normed.
            k_rope: (T, dr) the rotary key of all heads, position-encoded.
            projection: the layer's up-projections.
            scale: multiplies the scores.

        Returns:
            (T, H, dv).
        """
        write_step(self._pool, self.plan, self._pool.encode(latent, k_rope))
        return self._read(q_nope, q_rope, projection, scale)

    def _read(
        self, q_nope: mx.array, q_rope: mx.array, projection: LatentProjection, scale: float
    ) -> mx.array:
        """Attend over what is stored."""
        outputs = []
        if self.plan.short:
            own = slice(None, self.plan.num_short)
            outputs.append(self._absorbed(q_nope[own], q_rope[own], projection, scale))
        for chunk in self.plan.long:
            queries = mx.concatenate([q_nope[chunk.rows], q_rope[chunk.rows]], axis=-1)
            outputs.append(self._expanded(chunk, queries, projection, scale))
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return joined if self.plan.order is None else joined[self.plan.order]

    def _expanded(
        self, chunk: ChunkPlan, queries: mx.array, projection: LatentProjection, scale: float
    ) -> mx.array:
        """Outputs (n, H, dv) of queries (n, H, dn + dr) of a chunk.

        Latents are expanded a block at a time: what that takes does not grow with the context.
        """

        def read(start: int, stop: int, after: mx.array | None) -> tuple[mx.array, mx.array]:
            runs = cut_runs(chunk.reads, start, stop)
            latents, rotary = self._pool.read_runs(runs, after)
            keys, values = (part.swapaxes(0, 1) for part in projection.expand(latents))
            shared = mx.broadcast_to(rotary, (len(keys), *rotary.shape))
            return mx.concatenate([keys, shared], axis=-1), values

        num_values = projection.value_dim
        if self._tiles and chunk.window.size is None:
            return attend_in_tiles(queries, read, chunk.start, num_values, scale=scale)
        dims = queries.shape[-1], num_values
        return chunk.attend_to(queries, read, dims, scale=scale)

    def _absorbed(
        self, q_nope: mx.array, q_rope: mx.array, projection: LatentProjection, scale: float
    ) -> mx.array:
        """Outputs (N, H, dv) of the rows of short segments, in the order of the plan's parts."""
        pool, num_heads = self._pool, q_nope.shape[1]
        absorbed = pool.rotate(projection.absorb(q_nope))
        queries = mx.concatenate([absorbed, q_rope], axis=-1)  # (N, H, r + dr)
        softmax = Softmax(scale)
        parts = [part.attend(pool, queries, softmax) for part in self.plan.short]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        sums = mx.unflatten(joined, 1, (num_heads, pool.latent_dim))
        return projection.value(pool.rotate(sums))


@dataclass(frozen=True, slots=True)
class LatentKernelPlan:
    """Segments of at most 8 tokens that attend together through the `mla_attention` kernel."""

    rows: slice | None  # of the short rows of the step; None: all
    segments: Segments
    pages: mx.array  # (B, max_pages)
    window: AttentionWindow
    page_size: int
    _plans: dict[int, AttentionPlan] = field(default_factory=dict)  # by the number of heads

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Queries (N, H, r + dr) of all short rows -> those of these segments, (N', H * r)."""
        assert isinstance(pool, LatentPool)
        own = queries if self.rows is None else queries[self.rows]
        plan = self._plan(own.shape[1])
        outputs, _ = mla_attention_on_metal(
            own, pool.keys, plan, scale=softmax.scale, value_dim=pool.latent_dim
        )
        return outputs.flatten(1)

    def _plan(self, num_heads: int) -> AttentionPlan:
        if num_heads not in self._plans:
            planner = self.segments.memoised(
                ("latent attention", num_heads, self.window), lambda: self._planner(num_heads)
            )
            self._plans[num_heads] = planner(self.segments.starts, self.pages)
        return self._plans[num_heads]

    def _planner(self, num_heads: int) -> AttentionPlanner:
        return AttentionPlanner(
            counts=self.segments.counts,
            sealed=self.segments.sealed,
            slots=self.segments.slots,
            page_size=self.page_size,
            kv_heads=row_blocks(self.segments.width * num_heads),
            window=self.window.size,
            sinks=self.window.sinks,
        )


class LatentKernelPlanner:
    """Plans the short segments of a group of latent attention layers for the kernel.

    Args:
        group: the layer group.
        window: which positions a token sees.
        page_size: tokens a page.
    """

    def __init__(self, group: int, window: AttentionWindow, page_size: int) -> None:
        self._group = group
        self._window = window
        self._page_size = page_size

    def __call__(self, short: Segments, num_rows: int) -> Sequence[Part]:
        """Plan short segments that stand one after another in the flat list."""
        count, first = int(short.counts.sum()), int(short.rows[0])
        rows = first + np.arange(count, dtype=np.int32)
        own = None if count == num_rows else slice(first, first + count)
        plan = LatentKernelPlan(own, short, self._pages(short), self._window, self._page_size)
        return [(rows, plan)]

    def _pages(self, short: Segments) -> mx.array:
        def table() -> mx.array:
            return page_table(short.sealed_pages(self._group))

        if self._window.size is None:
            return short.memoised(("pages", self._group), table)
        return table()
