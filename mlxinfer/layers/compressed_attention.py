"""Attention to a window of tokens, and to entries that stand for blocks of tokens.

T = tokens of the step, D = numbers of a vector, which is key and value in one, H = query heads,
r = tokens of a block, N = blocks. Source: transformers' DeepSeek V4: compressed sparse attention
(CSA), whose entries overlap and are chosen by an index, and heavily compressed attention (HCA).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache_specs import EntrySpec, KVSpec
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import AttentionShape, Mixer
from .linear import HeadLinear, Projection
from .norm import Norm
from .rope import FusedRope
from .step import Step


class CompressedAttention(AttentionShape, Mixer):
    """Queries of low rank over one vector a token.

    As values turn with their positions too, the outputs are turned back by those of the queries.

    Args:
        inputs_proj: (T, hidden) -> (T, q_lora_rank + D), compressed queries and the token's vector.
        q_norm: over compressed queries.
        q_proj: (T, q_lora_rank) -> (T, H * D).
        q_eps: of the norm over each head's query, which has no weights.
        kv_norm: over vectors.
        group_proj: each group of heads, (G, T, H / G * D) -> (G, T, rank).
        o_proj: (T, G * rank) -> (T, hidden).
        num_heads, num_groups: H and G.
        spec: what the cache keeps of the window.
        scale: multiplies the scores.
        rope: of queries and vectors.
        sinks: (H,) learned logits that take part in each softmax.
        compressor: of the entries; None: tokens see the window alone.
    """

    __slots__ = (
        "back", "compressor", "group_proj", "inputs_proj", "kv_norm", "num_groups", "o_proj",
        "q_eps", "q_norm", "q_proj", "rope", "softmax", "spec",
    )  # fmt: skip

    spec: KVSpec

    def __init__(
        self,
        *,
        inputs_proj: Projection,
        q_norm: Norm,
        q_proj: Projection,
        q_eps: float,
        kv_norm: Norm,
        group_proj: HeadLinear,
        o_proj: Projection,
        num_heads: int,
        num_groups: int,
        spec: KVSpec,
        scale: float,
        rope: FusedRope,
        sinks: mx.array,
        compressor: "Compressor | None",
    ) -> None:
        super().__init__(num_heads, sinks=sinks)
        self.inputs_proj = inputs_proj
        self.q_norm = q_norm
        self.q_proj = q_proj
        self.q_eps = q_eps
        self.kv_norm = kv_norm
        self.group_proj = group_proj
        self.o_proj = o_proj
        self.num_groups = num_groups
        self.spec = spec
        self.softmax = Softmax(scale, sinks, None)
        self.rope = rope
        self.back = rope.backwards()
        self.compressor = compressor

    @property
    def parts(self) -> Sequence[Mixer]:
        """This mixer, and its compressor."""
        return (self,) if self.compressor is None else (self, self.compressor)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        both, dim, turns = self.inputs_proj(x), self.spec.key_dim, step.prepared[self.rope]
        compressed, vectors = self.q_norm(both[:, :-dim]), self.kv_norm(both[:, -dim:])
        queries = mx.unflatten(self.q_proj(compressed), -1, (self.num_heads, dim))
        queries = self.rope(mx.fast.rms_norm(queries, None, self.q_eps), turns)
        vectors = self.rope(vectors[:, None], turns)  # (T, 1, D)
        choice = [] if self.compressor is None else [self.compressor(x, step, compressed)]
        attended = step.caches[self].attend(queries, vectors, vectors, self.softmax, *choice)
        heads = self.back(mx.unflatten(attended, -1, (self.num_heads, dim)), turns)
        groups = mx.unflatten(heads.flatten(1), -1, (self.num_groups, -1)).swapaxes(0, 1)
        return self.o_proj(
            self.group_proj(groups, transposed=True).swapaxes(0, 1).flatten(1), residual
        )


@dataclass(frozen=True, slots=True)
class Series:
    """How one vector of a block is made: a weighted mean, each number with weights of its own.

    Attributes:
        places: (k, d) float32, what is added to the gates of the k tokens by their places.
        norm: over the mean.
        rope: by the position of the block's first token.
    """

    places: mx.array
    norm: Norm
    rope: FusedRope

    def __call__(self, vectors: mx.array, gates: mx.array, positions: mx.array) -> mx.array:
        """Vectors and gates (N, k, d) of tokens -> (N, d); a gate of -inf leaves a token out."""
        shares = mx.softmax(gates, axis=1).astype(vectors.dtype)
        mean = self.norm((vectors * shares).sum(axis=1))
        return self.rope(mean[:, None], self.rope.prepare(positions))[:, 0]


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """The queries that rank entries.

    Attributes:
        q_proj: compressed queries (T, q_lora_rank) -> (T, Hi * d).
        weights_proj: (T, hidden) -> (T, Hi), a weight of each head.
        rope: of the queries.
    """

    q_proj: Projection
    weights_proj: Projection
    rope: FusedRope

    def __call__(self, x: mx.array, compressed: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """Queries (T, Hi, d), and weights (T, Hi) that hold the scale of the scores."""
        weights = self.weights_proj(x).astype(mx.float32)
        queries = mx.unflatten(self.q_proj(compressed), -1, (weights.shape[1], -1))
        scale = (weights.shape[1] * queries.shape[-1]) ** -0.5
        return self.rope(queries, step.prepared[self.rope]), weights * scale


class Compressor(Mixer):
    """Projects tokens to their parts of a block's entry, and pools these parts to entries.

    The part of a token has, for each vector of an entry, numbers and a gate for each number. Where
    blocks overlap, a token has two parts: one for the next block, then one for its own block.

    Args:
        proj: (T, hidden) -> (T, raw), in any order.
        order: (raw,) the place of each number of a token's part in that output; None: as it is.
        series: of the index key, where there is one, and of the entry.
        index: None: every entry is seen.
        spec: what the cache keeps.
    """

    __slots__ = ("index", "order", "proj", "series", "spec")

    spec: EntrySpec

    def __init__(
        self,
        *,
        proj: Projection,
        order: mx.array | None,
        series: Sequence[Series],
        index: EntryIndex | None,
        spec: EntrySpec,
    ) -> None:
        self.proj = proj
        self.order = order
        self.series = tuple(series)
        self.index = index
        self.spec = spec

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, compressed: mx.array | None = None) -> Any:
        """The entries that tokens of x (T, hidden) see: the result of `EntryLayer.choose`.

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
            both = pairs[0] if len(pairs) == 1 else mx.concatenate(pairs, axis=1)
            gates = both[..., dim:].astype(mx.float32) + series.places
            if before is not None:
                counts = (positions[:, None] > 0) | (mx.arange(both.shape[1]) >= raw.shape[1])
                gates = mx.where(counts[..., None], gates, -mx.inf)
            pooled.append(series(both[..., :dim], gates, positions))
            start += 2 * dim
        return pooled
