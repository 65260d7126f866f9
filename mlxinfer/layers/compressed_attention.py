"""Attention to a window of tokens, and to compressed vectors that stand for blocks of tokens.

T = tokens of the step, D = numbers of a vector, which is key and value in one, H = query heads,
r = tokens of a block, N = blocks. Source: transformers' DeepSeek V4: compressed sparse attention
(CSA), whose blocks overlap and are chosen by an index, and heavily compressed attention (HCA).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..cache_specs import CompressedSpec, KVSpec
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import AttentionShape, Mixer
from .linear import HeadLinear, Projection
from .norm import Norm
from .rope import FusedRope
from .step import Step


@dataclass(slots=True, eq=False, kw_only=True)
class CompressedAttention(AttentionShape, Mixer):
    """Queries of low rank over one vector a token.

    As values rotate with their positions too, the outputs are rotated back by those of the queries.
    H = heads, G = groups of them.
    """

    inputs_proj: Projection  # (T, hidden) -> (T, q_lora_rank + D), queries and the token's vector
    q_norm: Norm  # over compressed queries
    q_proj: Projection  # (T, q_lora_rank) -> (T, H * D)
    q_eps: float  # of the norm over each head's query, which has no weights
    kv_norm: Norm  # over vectors
    group_proj: HeadLinear  # each group of heads, (G, T, H / G * D) -> (G, T, rank)
    o_proj: Projection  # (T, G * rank) -> (T, hidden)
    num_groups: int  # G
    spec: KVSpec  # what the cache keeps of the window
    softmax: Softmax  # with sinks
    rope: FusedRope  # of queries and vectors
    back: FusedRope = field(init=False)  # rotates outputs back
    compressor: "Compressor | None"  # of the compressed vectors; None: tokens see the window alone

    def __post_init__(self) -> None:
        assert self.softmax.sinks is not None
        AttentionShape.__init__(self, self.softmax.sinks.shape[0], sinks=self.softmax.sinks)
        self.back = self.rope.backwards()

    @property
    def parts(self) -> Sequence[Mixer]:
        return (self,) if self.compressor is None else (self, self.compressor)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        both, dim, positions = self.inputs_proj(x), self.spec.key_dim, step.prepared[self.rope]
        compressed, vectors = self.q_norm(both[:, :-dim]), self.kv_norm(both[:, -dim:])
        queries = mx.unflatten(self.q_proj(compressed), -1, (self.num_heads, dim))
        queries = self.rope(mx.fast.rms_norm(queries, None, self.q_eps), positions)
        vectors = self.rope(vectors[:, None], positions)  # (T, 1, D)
        choice = [] if self.compressor is None else [self.compressor(x, step, compressed)]
        attended = step.caches[self].attend(queries, vectors, vectors, self.softmax, *choice)
        heads = self.back(mx.unflatten(attended, -1, (self.num_heads, dim)), positions)
        groups = mx.unflatten(heads.flatten(1), -1, (self.num_groups, -1)).swapaxes(0, 1)
        return self.o_proj(
            self.group_proj(groups, transposed=True).swapaxes(0, 1).flatten(1), residual
        )


@dataclass(frozen=True, slots=True)
class Series:
    """How one vector of a block is made: a weighted mean, each number with weights of its own."""

    places: mx.array  # (k, d) float32, what is added to the gates of the k tokens by their places
    norm: Norm  # over the mean
    rope: FusedRope  # by the position of the block's first token

    def __call__(self, vectors: mx.array, gates: mx.array, positions: mx.array) -> mx.array:
        """Vectors and gates (N, k, d) of tokens -> (N, d); a gate of -inf leaves a token out."""
        shares = mx.softmax(gates, axis=1).astype(vectors.dtype)
        mean = self.norm((vectors * shares).sum(axis=1))
        return self.rope(mean[:, None], self.rope.prepare(positions))[:, 0]


@dataclass(frozen=True, slots=True)
class CompressedIndex:
    """The queries that rank compressed vectors."""

    q_proj: Projection  # compressed queries (T, q_lora_rank) -> (T, Hi * d)
    weights_proj: Projection  # (T, hidden) -> (T, Hi), a weight of each head
    rope: FusedRope  # of the queries

    def __call__(self, x: mx.array, compressed: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """Queries (T, Hi, d), and weights (T, Hi) that hold the scale of the scores."""
        weights = self.weights_proj(x).astype(mx.float32)
        queries = mx.unflatten(self.q_proj(compressed), -1, (weights.shape[1], -1))
        scale = (weights.shape[1] * queries.shape[-1]) ** -0.5
        return self.rope(queries, step.prepared[self.rope]), weights * scale


@dataclass(slots=True, eq=False, kw_only=True)
class Compressor(Mixer):
    """Projects tokens to their parts of a block's vectors, and pools these parts.

    A token's part holds, for each vector of the block, that vector's numbers and one gate for each
    number. Where blocks overlap, a token has two parts: first for the next block, then for its own.
    """

    proj: Projection  # (T, hidden) -> (T, raw), in any order
    order: mx.array | None  # (raw,) the place of each number of a token's part in that output
    series: Sequence[Series]  # of the index key, where there is one, and of the vector
    index: CompressedIndex | None  # None: every vector is seen
    spec: CompressedSpec  # what the cache keeps

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, compressed: mx.array | None = None) -> Any:
        """The vectors that tokens of x (T, hidden) see: the result of `CompressedLayer.choose`.

        `compressed`: the queries' compressed form (T, q_lora_rank), which an index reads.
        """
        raw = self.proj(x)
        if self.order is not None:
            raw = mx.take(raw, self.order, axis=-1)
        ranks: tuple[mx.array, mx.array] | tuple[None, None] = None, None
        if self.index is not None:
            assert compressed is not None
            ranks = self.index(x, compressed, step)
        return step.caches[self].choose(*ranks, raw, step.positions)

    def pool(self, raw: mx.array, before: mx.array | None, positions: mx.array) -> list[mx.array]:
        """The vectors (N, d) of blocks.

        Args:
            raw: (N, r, raw) what tokens of a block brought.
            before: (N, r, carried) what those of the block before it brought for this one, which
                does not count where a block is the first; None: blocks do not overlap.
            positions: (N,) of their first tokens.
        """
        halves = [raw] if before is None else [before, raw[..., before.shape[-1] :]]
        pooled, start = [], 0
        for series in self.series:
            dim = series.places.shape[1]
            pairs = [half[..., start : start + 2 * dim] for half in halves]
            gated = pairs[0] if len(pairs) == 1 else mx.concatenate(pairs, axis=1)
            gates = gated[..., dim:].astype(mx.float32) + series.places
            if before is not None:
                counts = (positions[:, None] > 0) | (mx.arange(gated.shape[1]) >= raw.shape[1])
                gates = mx.where(counts[..., None], gates, -mx.inf)
            pooled.append(series(gated[..., :dim], gates, positions))
            start += 2 * dim
        return pooled
