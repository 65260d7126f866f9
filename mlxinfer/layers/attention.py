"""Grouped-query attention over a flat list of tokens (arXiv 2305.13245), as a mixer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from ..cache_specs import CacheSpec, KVSpec
from ..metal_kernels.attention_heads import Heads, HeadsForm
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.stored import KVFormat
from ..metal_kernels.variants import KernelUse, ModelForm
from .linear import Projection
from .mlp import Activation
from .norm import Norm
from .rope import QueryScale, RopeSpec, inverse_frequencies
from .step import Rope, Rows, Step

# From formats of keys and of values, and numbers of a key that a joint vector has; 0: it has none.
HeadsMaker = Callable[[KVFormat, KVFormat, int], Heads]


class Mixer(Protocol):
    """The first block of a layer: it lets tokens of one sequence see each other.

    Attributes:
        spec: what the cache keeps for this layer.
    """

    __slots__ = ()

    spec: CacheSpec

    @property
    def parts(self) -> "Sequence[Mixer]":
        """The mixers of the block that have a cache of their own: this one."""
        return (self,)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels that can do the mixer's own work; those of attention belong to its cache."""

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """Let the tokens of a step see each other.

        Args:
            x: (T, hidden).
            step: of the tokens.
            residual: (R, hidden) that is added to the result; None: nothing is.

        Returns:
            (R, hidden): of all T rows, or of those that are left in the last layer that stores
            anything, see `Step.narrow`.
        """


class ParallelMixers:
    """Mixers of one layer that read the same input; their outputs are added up.

    Args:
        parts: each with a cache of its own.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Mixer]) -> None:
        self.parts = tuple(parts)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return [use for part in self.parts for use in part.kernels(model)]

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (R, hidden), plus the residual."""
        first, *later = self.parts
        y = first(x, step, residual)
        for part in later:
            y = part(x, step, y)
        return y


class AttentionShape:
    """The facts about a layer that a Metal kernel for attention needs.

    Args:
        num_heads: of queries.
        sinks, make_heads: see `Attention`.
    """

    __slots__ = ("make_heads", "num_heads", "sinks")

    def __init__(
        self, num_heads: int, *, sinks: mx.array | None = None, make_heads: HeadsMaker | None = None
    ) -> None:
        self.num_heads = num_heads
        self.sinks = sinks
        self.make_heads = make_heads


def heads_maker(
    form: HeadsForm, rope: RopeSpec | None, norm_weight: mx.array | None, norm_eps: float
) -> HeadsMaker | None:
    """Settings of norm and rope for the kernel that does both; None: it has no such rope.

    Args:
        form: of the layer, but for its rope and the formats of what is stored.
        rope: None: positions are not encoded.
        norm_weight: (num_heads + num_kv_heads, head_dim) of queries and keys; None: no norm.
        norm_eps: added to the mean square.
    """
    if rope is not None and rope.long is not None:
        return None
    frequencies, magnitude, turning = None, 1.0, 0
    if rope is not None:
        frequencies, turning = mx.array(inverse_frequencies(rope), mx.float32), rope.dims
        # Where whole heads turn the attention scale has the factor, see scale_factor.
        magnitude = 1.0 if rope.dims == form.head_dim else rope.attention_factor

    def make(key_format: KVFormat, value_format: KVFormat, joint: int) -> Heads:
        stored = {"key_format": key_format, "value_format": value_format, "joint": joint}
        return Heads(
            replace(form, turning=turning, **stored),  # type: ignore[arg-type]  # fields of it
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            frequencies=frequencies,
            magnitude=magnitude,
        )

    return make


class Attention(AttentionShape, Mixer):
    """Fused QKV projection, optional QK-norm, rope on Q and K together, then the KV cache.

    Args:
        qkv_proj: (T, hidden) -> (T, (num_heads + num_kv_heads) * head_dim + num_kv_heads *
            value_dim).
        o_proj: (T, num_heads * value_dim) -> (T, hidden).
        spec: what the cache keeps for this layer.
        scale: multiplies the scores.
        rope: None: positions are not encoded.
        qk_norm: over (T, num_heads + num_kv_heads, head_dim); None: no norm.
        norm_last: the norm comes behind the rope, else before it.
        query_scale: factors of queries by their positions, behind the rope; None: 1.
        v_norm: over (T, num_kv_heads, value_dim); None: no norm.
        sinks: (num_heads,) learned logits that take part in each softmax; None: there are none.
        gate_proj: (T, hidden) -> (T, num_heads * value_dim) or (T, num_heads) gates of the heads'
            outputs, of each number or of each head; None: there are none.
        gate: of what `gate_proj` gives; the result multiplies the outputs.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they stay.
        key_bias: (num_kv_heads, head_dim) that `qkv_proj` adds to keys, where nothing but the rope
            comes behind it, and the spec says so; None: nothing is known of such.
        make_heads: settings of the one kernel that stands for norms, rope and storing; None: there
            is no such kernel for this layer.
        indexer: chooses the tokens that each token sees; None: it sees all before it.
    """

    __slots__ = (
        "gate",
        "gate_proj",
        "indexer",
        "k_start",
        "key_bias",
        "norm_last",
        "o_proj",
        "q_dims",
        "qk_norm",
        "qk_shape",
        "qkv_proj",
        "query_scale",
        "rope",
        "softmax",
        "spec",
        "v_norm",
        "v_shape",
        "v_start",
    )

    spec: KVSpec

    def __init__(
        self,
        *,
        qkv_proj: Projection,
        o_proj: Projection,
        num_heads: int,
        spec: KVSpec,
        scale: float,
        rope: Rope | None,
        qk_norm: Norm | None = None,
        norm_last: bool = False,
        query_scale: QueryScale | None = None,
        v_norm: Norm | None = None,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
        gate_proj: Projection | None = None,
        gate: Activation = mx.sigmoid,
        key_bias: mx.array | None = None,
        make_heads: HeadsMaker | None = None,
        indexer: Mixer | None = None,
    ) -> None:
        assert spec.key_bias == (key_bias is not None)
        apart = norm_last or query_scale is not None
        super().__init__(num_heads, sinks=sinks, make_heads=None if apart else make_heads)
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.spec = spec
        self.k_start = (num_heads,)
        self.q_dims = num_heads * spec.key_dim
        self.qk_shape = (-1, num_heads + spec.num_kv_heads, spec.key_dim)
        self.v_shape = (-1, spec.num_kv_heads, spec.value_dim)
        self.v_start = ((num_heads + spec.num_kv_heads) * spec.key_dim,)
        self.softmax = Softmax(scale, sinks, soft_cap)
        self.rope = rope
        self.qk_norm = qk_norm
        self.norm_last = norm_last
        self.query_scale = query_scale
        self.v_norm = v_norm
        self.gate_proj = gate_proj
        self.gate = gate
        self.key_bias = key_bias
        self.indexer = indexer

    @property
    def parts(self) -> Sequence[Mixer]:
        """This mixer, and its indexer."""
        return (self,) if self.indexer is None else (self, self.indexer)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (R, hidden), plus the residual."""
        cache = step.caches[self]
        # (T, (H + Hkv) * D + Hkv * Dv)
        projected = self.qkv_proj(x) if step.rows is None else self._projected(x, step.rows)
        if step.rows is not None:
            step.stored.append(projected)
        choice = [] if self.indexer is None else [self.indexer(x, step)]
        outputs: mx.array
        if cache.heads is not None and not any(choice):
            outputs = cache.attend_heads(projected, self.softmax, step.rows)
        else:
            qk, values = mx.split(projected, self.v_start, axis=1)
            qk = qk.reshape(self.qk_shape)  # (T, H + Hkv, D)
            values = values.reshape(self.v_shape)  # (T, Hkv, Dv)
            if self.qk_norm is not None and not self.norm_last:
                qk = self.qk_norm(qk)
            if self.rope is not None:
                qk = self.rope(qk, step.prepared[self.rope])
            if self.qk_norm is not None and self.norm_last:
                qk = self.qk_norm(qk)
            queries, keys = mx.split(qk, self.k_start, axis=1)
            if self.query_scale is not None:
                queries = self.query_scale(queries, step.prepared[self.query_scale])
            if self.v_norm is not None:
                values = self.v_norm(values)
            outputs = cache.attend(queries, keys, values, self.softmax, *choice, rows=step.rows)
        if self.gate_proj is not None:
            gates = self.gate(self.gate_proj(step.read(x)))[..., None]  # (R, H, 1 or Dv)
            outputs = (outputs.reshape(*gates.shape[:2], -1) * gates).reshape(outputs.shape)
        return self.o_proj(outputs, residual)  # of the heads side by side

    def _projected(self, x: mx.array, rows: Rows) -> mx.array:
        """`qkv_proj` of x (T, hidden), where queries of other rows than `rows` may be zeros."""
        q_proj = self.qkv_proj.some_outputs(slice(self.q_dims))
        kv_proj = self.qkv_proj.some_outputs(slice(self.q_dims, None))
        if q_proj is None or kv_proj is None:
            return self.qkv_proj(x)
        queries, places = mx.zeros((len(x), self.q_dims), x.dtype), mx.array(rows)
        queries[places] = q_proj(x[places]).astype(x.dtype)
        return mx.concatenate([queries, kv_proj(x)], axis=1)

    def turned_bias(self, positions: mx.array, heads: mx.array) -> mx.array:
        """The bias on keys of `heads` (N,): (N, head_dim) float32.

        `positions`: of these keys, (N,) or (3, N) with M-RoPE.
        """
        assert self.key_bias is not None
        bias = self.key_bias.astype(mx.float32)[heads][:, None]  # (N, 1, D)
        if self.rope is not None:
            bias = self.rope(bias, self.rope.prepare(positions))
        return bias[:, 0].astype(mx.float32)


class SharedAttention:
    """Attention over the keys and values of an earlier layer; only queries are its own.

    Args:
        q_proj: (R, hidden) -> (R, num_heads * head_dim).
        o_proj: (R, num_heads * head_dim) -> (R, hidden).
        source: the layer that stores keys and values, which has run before in the same step.
        q_norm: over (R, num_heads, head_dim); None: no norm.
    """

    __slots__ = ("o_proj", "q_norm", "q_proj", "source")

    parts: Sequence[Mixer] = ()  # it has no cache of its own

    def __init__(
        self, *, q_proj: Projection, o_proj: Projection, source: Attention, q_norm: Norm | None
    ) -> None:
        self.q_proj = q_proj
        self.o_proj = o_proj
        self.source = source
        self.q_norm = q_norm

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (R, hidden) -> (R, hidden), plus the residual."""
        source = self.source
        queries = self.q_proj(x).reshape(x.shape[0], source.num_heads, -1)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        if source.rope is not None:
            queries = source.rope(queries, step.read_prepared[source.rope])
        cache = step.caches[source]
        return self.o_proj(cache.attend_again(queries, source.softmax, step.rows), residual)


LayerMixer = Mixer | ParallelMixers | SharedAttention
"""The mixer of a layer. It has a cache of its own, several of them, or none."""
