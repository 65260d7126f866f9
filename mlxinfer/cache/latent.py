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
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..cache_specs import LatentSpec
from ..config import KVOptions
from ..errors import InvalidRequestError
from ..metal_kernels.attention_cases import PREFILL, AttentionForm, mla_variant
from ..metal_kernels.attention_plan import MAX_QUERIES, AttentionPlan
from ..metal_kernels.block_attention import attend_in_tiles
from ..metal_kernels.mla_attention import DIMS, KINDS, mla_attention, row_blocks
from ..metal_kernels.paged_attention import DTYPES, AttentionCall, Softmax, has_dims
from ..metal_kernels.stored import PLAIN, KVFormat, Plane, Runs
from ..metal_kernels.variants import ANY_ROWS, KERNEL, Variant
from .attention import Prepared, attend_rows
from .chunks import Chunk, cut_runs
from .keys_values import rotatable
from .paged import KEY_BIAS, Choice, Formats, PagedLayer, Stored, unrotated

MOST_SCORES = 1 << 26  # scores of a ranked layer that are there at once


def chooses_itself(options: KVOptions) -> InvalidRequestError:
    """Why a model whose index chooses among all tokens takes no window."""
    return InvalidRequestError(
        f"kv_window is {options.window}, and this model chooses the tokens that it sees by itself, "
        "among all. Leave kv_window out.",
        param="kv_window",
    )


Index = tuple[mx.array, mx.array, mx.array, dict[int, mx.array]]
"""Of the T tokens of a step: queries (T, Hi, di), weights (T, Hi) and keys (T, di); queries and
keys are position-encoded. Then the choice: for the first of some rows, (n, S) whether a row sees a
token. The layer that has the keys makes the choice; layers that share the index read it."""


class LatentLayer(PagedLayer):
    """One latent attention layer: one plane under one head, or `more` of them.

    With 4 bits the latent part (not the rotary part) is multiplied by a Hadamard matrix before it
    is stored. This spreads outliers of single channels over all. The matrix is its own inverse,
    because `check` allows powers of two only.
    """

    spec: LatentSpec
    prepared: Prepared

    def __init__(
        self,
        spec: LatentSpec,
        formats: Formats,
        dtype: mx.Dtype,
        more: Sequence[tuple[KVFormat, int]] = (),
    ) -> None:
        kinds = [(formats[0], spec.latent_dim + spec.rope_dim), *more]
        super().__init__(spec, formats, dtype, kinds, heads=1)
        self.latent_dim = spec.latent_dim
        self.form = (spec.latent_dim, spec.rope_dim, formats)

    @classmethod
    def of(cls, spec: LatentSpec, formats: Formats, dtype: mx.Dtype) -> "LatentLayer":
        kind = RankedLayer if spec.num_ranked else LatentLayer
        return kind(spec, unrotated(formats), dtype)

    @staticmethod
    def windowed(spec: LatentSpec, options: KVOptions) -> LatentSpec:
        """See `KeyValueLayer`; raise InvalidRequestError where an index chooses tokens."""
        if spec.num_ranked:
            raise chooses_itself(options)
        return replace(spec, window=options.window, sinks=options.sinks)

    @staticmethod
    def check(spec: LatentSpec, formats: Formats, *, key_bias: bool) -> None:
        """Raise InvalidRequestError where the layer cannot be stored in these formats.

        One vector holds keys and values; rotating it back takes a matrix that is its own inverse.
        """
        if formats[0].bits == 4 and key_bias:
            raise InvalidRequestError(KEY_BIAS, param="kv_bits")
        fmt, dim = formats[0], spec.latent_dim
        if fmt != formats[1]:
            asked = tuple(kv_format.bits or None for kv_format in formats)
            raise InvalidRequestError(
                f"kv_bits is {asked}, and this model keeps keys and values in one latent vector; "
                "give one number, kv_bits=8 or kv_bits=4.",
                param="kv_bits",
            )
        if (dim + spec.rope_dim) % 8:
            raise InvalidRequestError(
                f"kv_bits needs latent vectors of a multiple of 8 numbers; this model has "
                f"{dim + spec.rope_dim}. Leave kv_bits out.",
                param="kv_bits",
            )
        if fmt.bits == 4 and (dim & (dim - 1) or not rotatable(dim)):
            raise InvalidRequestError(
                f"kv_bits=4 rotates latent vectors, which {dim} numbers do not allow (a "
                "power of two would); use kv_bits=8.",
                param="kv_bits",
            )

    def views(self) -> tuple[Plane, Plane]:
        """Keys are whole vectors, and values the latent part of them."""
        return self.planes[0], self.planes[0].cut(0, self.latent_dim)

    def rotate(self, latents: mx.array) -> mx.array:
        """(..., r) to or from the basis in which latents are stored."""
        return mx.hadamard_transform(latents) if self.formats[0].rotates else latents

    def encode(self, latents: mx.array, k_rope: mx.array, index: Index | None) -> Stored:
        """Encode latents (T, r), rotary keys (T, dr) and the index as they are stored."""
        vectors = mx.concatenate([self.rotate(latents), k_rope], axis=-1)
        return [self.formats[0].encode(vectors[:, None])]

    def read_runs(self, runs: Runs, after: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Latents (S, r) and rotary keys (S, dr) of several runs, read not before `after`."""
        vectors = self.keys.read_runs(runs, after)[0]
        return self.rotate(vectors[:, : self.latent_dim]), vectors[:, self.latent_dim :]

    # -- a step ---------------------------------------------------------------------------------

    def attend(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        *,
        projection: Any,
        scale: float,
        index: Index | None = None,
        choice: Choice | None = None,
    ) -> mx.array:
        """Store this step's vectors, then attend over all that each token may see.

        Args:
            q_nope: (T, H, dn) the queries' part without rope.
            q_rope: (T, H, dr) their rotary part, position-encoded.
            latent: (T, r) compressed keys and values, normed.
            k_rope: (T, dr) the rotary key of all heads, position-encoded.
            projection: the mixer's up-projections: `absorb` of queries (N, H, dn) -> (N, H, r),
                `value` of weighted sums of latents (N, H, r) -> (N, H, dv), and `expand` of latents
                (S, r) -> keys (S, H, dn) and values (S, H, dv).
            choice: the tokens that each of them sees; None: all before it, or as `index` says.

        Returns:
            (T, H, dv).
        """
        stored = self.encode(latent, k_rope, index)
        self.write(stored, self.prepared.place, self.prepared.page_writes)
        if choice is None:
            return self._read(q_nope, q_rope, projection, scale, index)
        queries = mx.concatenate([self.rotate(projection.absorb(q_nope)), q_rope], axis=-1)
        sums = choice.attend(self, queries, Softmax(scale))
        output: mx.array = projection.value(
            self.rotate(mx.unflatten(sums, 1, (-1, self.latent_dim)))
        )
        return output

    def _read(
        self, q_nope: mx.array, q_rope: mx.array, projection: Any, scale: float, index: Index | None
    ) -> mx.array:
        prepared, outputs = self.prepared, []
        if prepared.short:
            rows = slice(None, prepared.num_short)
            outputs.append(self._absorbed(q_nope[rows], q_rope[rows], projection, scale))
        for chunk in prepared.chunks:
            queries = mx.concatenate([q_nope[chunk.rows], q_rope[chunk.rows]], axis=-1)
            outputs.append(self._expanded(chunk, queries, projection, scale))
        return prepared.joined(outputs)

    def _expanded(self, chunk: Chunk, queries: mx.array, projection: Any, scale: float) -> mx.array:
        """Outputs (n, H, dv) of queries (n, H, dn + dr) of a chunk.

        Latents are expanded a block at a time: what that takes does not grow with the context.
        """

        def read(start: int, stop: int, after: mx.array | None) -> tuple[mx.array, mx.array]:
            latents, rotary = self.read_runs(cut_runs(chunk.reads, start, stop), after)
            keys, values = (part.swapaxes(0, 1) for part in projection.expand(latents))
            shared = mx.broadcast_to(rotary, (len(keys), *rotary.shape))
            return mx.concatenate([keys, shared], axis=-1), values

        softmax, (_, heads, key_dim), value_dim = (
            Softmax(scale),
            queries.shape,
            projection.value_dim,
        )
        token_bytes = heads * (key_dim + value_dim) * queries.itemsize
        ways = chunk.ways((key_dim, value_dim), token_bytes, softmax)
        if chunk.sees_all_before:
            ways += (KERNEL,)
        way = self.fastest_prompt(ANY_ROWS, chunk.num_queries, ways)
        if way == KERNEL:
            return attend_in_tiles(queries, read, chunk.start, value_dim, scale=scale)
        output = chunk.attend_to(queries.swapaxes(0, 1), read, softmax, way)
        return output.swapaxes(0, 1)

    def _absorbed(
        self, q_nope: mx.array, q_rope: mx.array, projection: Any, scale: float
    ) -> mx.array:
        """Outputs (N, H, dv) of the rows of short segments, in the order of their parts."""
        absorbed = self.rotate(projection.absorb(q_nope))
        queries = mx.concatenate([absorbed, q_rope], axis=-1)  # (N, H, r + dr)
        softmax, short = Softmax(scale), self.prepared.short
        parts = [attend_rows(part, self, queries, softmax) for part in short]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        sums = mx.unflatten(joined, 1, (q_nope.shape[1], self.latent_dim))
        output: mx.array = projection.value(self.rotate(sums))
        return output

    # -- kernels --------------------------------------------------------------------------------

    def attention_variants(self, mixer: Any) -> dict[int, Variant]:
        """See `PagedLayer`: one of tokens that decode, one of tokens under verification."""
        dims, fmt = (self.spec.latent_dim + self.spec.rope_dim, self.latent_dim), self.formats[0]
        if dims not in DIMS or self.dtype not in DTYPES or fmt.bits not in KINDS:
            return {}
        one, several = (
            mla_variant(self.dtype, mixer.num_heads, fmt, count, dims[0])
            for count in (1, MAX_QUERIES)
        )
        return {1: one, **dict.fromkeys(range(2, MAX_QUERIES + 1), several)}

    def prefill_variant(self, mixer: Any) -> Variant | None:
        """See `PagedLayer`: over expanded latents, block by block."""
        projection = mixer.projection
        dims = projection.key_dim + self.spec.rope_dim, projection.value_dim
        if self.spec.window is not None or not has_dims(self.dtype, dims):
            return None
        return AttentionForm(self.dtype, *dims, group=1, log_sums=True).variant(PREFILL)

    def plan_heads(self, num_heads: int, width: int) -> int:
        """See `PagedLayer`: threadgroups that share a sequence's query rows."""
        return row_blocks(width * num_heads)

    def kernel(self, queries: mx.array, plan: AttentionPlan, softmax: Softmax) -> AttentionCall:
        dim = self.latent_dim
        return mla_attention(queries, self.keys, plan, scale=softmax.scale, value_dim=dim)


class RankedLayer(LatentLayer):
    """Latent attention to the tokens that an indexer ranks highest: DeepSeek Sparse Attention.

    n = queries of one sequence, S = its tokens, Hi = heads of the indexer, di = numbers of an index
    key. The rank of a token is the sum over heads of weight * max(query · key, 0). Of equal ranks
    the earlier token wins. References leave ties to their top-k, which does not define an order.
    Here the result must not depend on how a step was cut. Source: DeepSeek-V3.2, arXiv 2512.02556.

    Index keys lie in a plane of their own, in the activations' dtype: with fewer bits the index
    would choose other tokens. A sequence that is no longer than the number of chosen tokens is seen
    as a whole. A layer without such a plane sees the tokens that an earlier layer's index chose.
    """

    def __init__(self, spec: LatentSpec, formats: Formats, dtype: mx.Dtype) -> None:
        keys = [(PLAIN, spec.index_dim)] if spec.index_dim else []
        super().__init__(spec, formats, dtype, keys)
        self.num_ranked = spec.num_ranked

    def encode(self, latents: mx.array, k_rope: mx.array, index: Index | None) -> Stored:
        """See `LatentLayer`, and the keys of the index where the layer keeps them."""
        assert index is not None
        keys = [PLAIN.encode(index[2][:, None])] if self.spec.index_dim else []
        return [*super().encode(latents, k_rope, index), *keys]

    def _read(
        self, q_nope: mx.array, q_rope: mx.array, projection: Any, scale: float, index: Index | None
    ) -> mx.array:
        metadata = self.prepared.metadata
        if index is None or int(metadata.positions.max()) < self.num_ranked:
            return super()._read(q_nope, q_rope, projection, scale, index)
        assert metadata.spans is None, "ranks are of earlier tokens"
        absorbed = self.rotate(projection.absorb(q_nope))
        queries = mx.concatenate([absorbed, q_rope], axis=-1)  # (T, H, r + dr)
        output: mx.array = projection.value(self.rotate(self._attend_ranked(queries, index, scale)))
        return output

    def _attend_ranked(self, queries: mx.array, index: Index, scale: float) -> mx.array:
        """Queries (T, H, r + dr) of latent vectors -> weighted sums of latents (T, H, r)."""
        outputs: list[mx.array] = []
        rankers, weights, _, chosen = index
        for place in self.prepared.sequences():
            rows = place.rows
            vectors, *keys = (self.read_whole(plane, place)[0] for plane in self.planes)  # (S, ...)
            values = vectors[None, None, :, : self.latent_dim]
            heads = max(queries.shape[1], rankers.shape[1])
            block = max(1, MOST_SCORES // (heads * len(vectors)))
            for first in range(rows.start, rows.stop, block):
                chunk = slice(first, min(first + block, rows.stop))
                block_queries = queries[chunk].swapaxes(0, 1)[None]  # (1, H, n, r + dr)
                if outputs:
                    # one block's scores at a time
                    block_queries = mx.depends(block_queries, outputs[-1])
                if keys:
                    position = place.start + first - rows.start
                    places = mx.arange(len(vectors))
                    visible = places <= position + mx.arange(chunk.stop - first)[:, None]
                    best = ranked(rankers[chunk], weights[chunk], keys[0], visible, self.num_ranked)
                    chosen[first] = best
                output = mx.fast.scaled_dot_product_attention(
                    block_queries, vectors[None, None], values, scale=scale, mask=chosen[first]
                )
                outputs.append(output[0].swapaxes(0, 1))
        return mx.concatenate(outputs)


def ranked(
    queries: mx.array, weights: mx.array, keys: mx.array, visible: mx.array, count: int
) -> mx.array:
    """(n, S) whether a key is among the `count` best of those that are visible.

    Args:
        queries: (n, Hi, di).
        weights: (n, Hi).
        keys: (S, di).
        visible: (n, S).
    """
    if len(keys) <= count:
        return visible
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).T  # (n, Hi, S)
    return best(
        (weights.astype(mx.float32)[:, None] @ mx.maximum(scores, 0.0))[:, 0], visible, count
    )


def best(ranks: mx.array, visible: mx.array, count: int) -> mx.array:
    """(..., S) whether a token or block is among the `count` visible ones of the highest ranks.

    Of equal ranks the earlier counts.
    """
    if ranks.shape[-1] <= count:
        return mx.broadcast_to(visible, ranks.shape)
    ranks = mx.where(visible, ranks, -mx.inf)
    lowest = mx.min(mx.topk(ranks, count, axis=-1), axis=-1, keepdims=True)
    above = ranks > lowest
    equal = (ranks == lowest) & visible
    room = count - mx.sum(above, axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
