"""Grouped-query attention over a flat list of tokens (arXiv 2305.13245), as a mixer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

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
    """The first block of a layer: it lets tokens of one sequence see each other."""

    __slots__ = ()

    spec: CacheSpec

    @property
    def parts(self) -> "Sequence[Mixer]":
        return (self,)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels that can do the mixer's own work; those of attention belong to its cache."""

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """Let the tokens of a step see each other.

        Args:
            x: (T, hidden).
            residual: (R, hidden) that is added to the result; None: nothing is.

        Returns:
            (R, hidden): of all T rows, or of those that are left in the last layer that stores
            anything, see `Step.narrow`.
        """


class ParallelMixers:
    """Mixers of one layer that read the same input; their outputs are added up."""

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
        sinks: (num_heads,) learned logits that take part in each softmax; None: there are none.
        make_heads: see `AttentionArgs`.
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
        form: of the layer, without its rope and the formats of what is stored.
        rope: None: positions are not encoded.
        norm_weight: (num_heads + num_kv_heads, head_dim) of queries and keys; None: no norm.
        norm_eps: added to the mean square.
    """
    if rope is not None and rope.long is not None:
        return None
    frequencies, magnitude, rope_dims = None, 1.0, 0
    if rope is not None:
        frequencies, rope_dims = mx.array(inverse_frequencies(rope), mx.float32), rope.dims
        # Where whole heads rotate the attention scale has the factor, see scale_factor.
        magnitude = 1.0 if rope.dims == form.head_dim else rope.attention_factor

    def make(key_format: KVFormat, value_format: KVFormat, joint: int) -> Heads:
        stored = {"key_format": key_format, "value_format": value_format, "joint": joint}
        return Heads(
            replace(form, rope_dims=rope_dims, **stored),  # type: ignore[arg-type]  # fields of it
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            frequencies=frequencies,
            magnitude=magnitude,
        )

    return make


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionArgs:
    """The attention of one layer, as its family fills it in."""

    # (T, hidden) -> (T, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim)
    qkv_proj: Projection
    o_proj: Projection  # (T, num_heads * value_dim) -> (T, hidden)
    num_heads: int  # of queries
    spec: KVSpec  # what the cache keeps for this layer
    softmax: Softmax  # with (num_heads,) learned logits of sinks, where the layer has them
    rope: Rope | None  # None: positions are not encoded
    qk_norm: Norm | None = None  # over (T, num_heads + num_kv_heads, head_dim); None: no norm
    norm_last: bool = False  # the norm comes behind the rope, else before it
    # factors of queries by their positions, behind the rope; None: 1
    query_scale: QueryScale | None = None
    v_norm: Norm | None = None  # over (T, num_kv_heads, value_dim); None: no norm
    # (T, hidden) -> (T, num_heads * value_dim) or (T, num_heads) gates of the heads' outputs, of
    # each number or of each head; None: there are none
    gate_proj: Projection | None = None
    gate: Activation = mx.sigmoid  # of what `gate_proj` gives; the result multiplies the outputs
    # (num_kv_heads, head_dim) that `qkv_proj` adds to keys, where nothing but the rope comes behind
    # it, and the spec says so; None: nothing is known of such
    key_bias: mx.array | None = None
    # settings of the one kernel that stands for norms, rope and storing; None: there is no such
    # kernel for this layer
    make_heads: HeadsMaker | None = None
    # chooses the tokens that each token sees; None: it sees all before it
    indexer: Mixer | None = None


class Attention(AttentionShape, Mixer):
    """Fused QKV projection, optional QK-norm, rope on Q and K together, then the KV cache."""

    __slots__ = ("args", "k_start", "q_dims", "qk_shape", "spec", "v_shape", "v_start")

    spec: KVSpec

    def __init__(self, args: AttentionArgs) -> None:
        heads, spec = args.num_heads, args.spec
        assert spec.key_bias == (args.key_bias is not None)
        in_turn = not args.norm_last and args.query_scale is None
        make_heads = args.make_heads if in_turn else None
        super().__init__(heads, sinks=args.softmax.sinks, make_heads=make_heads)
        self.args, self.spec = args, spec
        self.k_start = (heads,)
        self.q_dims = heads * spec.key_dim
        self.qk_shape = (-1, heads + spec.num_kv_heads, spec.key_dim)
        self.v_shape = (-1, spec.num_kv_heads, spec.value_dim)
        self.v_start = ((heads + spec.num_kv_heads) * spec.key_dim,)

    @property
    def parts(self) -> Sequence[Mixer]:
        return (self,) if self.args.indexer is None else (self, self.args.indexer)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (R, hidden), plus the residual."""
        args, cache = self.args, step.caches[self]
        # (T, (H + Hkv) * D + Hkv * Dv)
        projected = args.qkv_proj(x) if step.rows is None else self._projected(x, step.rows)
        if step.rows is not None:
            step.stored.append(projected)
        choice = None if args.indexer is None else args.indexer(x, step)
        outputs: mx.array
        if cache.step_head_writer is not None and choice is None:
            outputs = cache.attend_heads(projected, args.softmax, step.rows)
        else:
            qk, values = mx.split(projected, self.v_start, axis=1)
            qk = qk.reshape(self.qk_shape)  # (T, H + Hkv, D)
            values = values.reshape(self.v_shape)  # (T, Hkv, Dv)
            if args.qk_norm is not None and not args.norm_last:
                qk = args.qk_norm(qk)
            if args.rope is not None:
                qk = args.rope(qk, step.prepared[args.rope])
            if args.qk_norm is not None and args.norm_last:
                qk = args.qk_norm(qk)
            queries, keys = mx.split(qk, self.k_start, axis=1)
            if args.query_scale is not None:
                queries = args.query_scale(queries, step.prepared[args.query_scale])
            if args.v_norm is not None:
                values = args.v_norm(values)
            outputs = cache.attend(queries, keys, values, args.softmax, choice, rows=step.rows)
        if args.gate_proj is not None:
            gates = args.gate(args.gate_proj(step.read(x)))[..., None]  # (R, H, 1 or Dv)
            outputs = (outputs.reshape(*gates.shape[:2], -1) * gates).reshape(outputs.shape)
        return args.o_proj(outputs, residual)  # of the heads side by side

    def _projected(self, x: mx.array, rows: Rows) -> mx.array:
        """`qkv_proj` of x (T, hidden), where queries of other rows than `rows` may be zeros."""
        qkv_proj = self.args.qkv_proj
        q_proj = qkv_proj.some_outputs(slice(self.q_dims))
        kv_proj = qkv_proj.some_outputs(slice(self.q_dims, None))
        if q_proj is None or kv_proj is None:
            return qkv_proj(x)
        queries, places = mx.zeros((len(x), self.q_dims), x.dtype), mx.array(rows)
        queries[places] = q_proj(x[places]).astype(x.dtype)
        return mx.concatenate([queries, kv_proj(x)], axis=1)

    def turned_bias(self, positions: mx.array, heads: mx.array) -> mx.array:
        """The bias on keys of `heads` (N,): (N, head_dim) float32.

        `positions`: of these keys, (N,) or (3, N) with M-RoPE.
        """
        args = self.args
        assert args.key_bias is not None
        bias = args.key_bias.astype(mx.float32)[heads][:, None]  # (N, 1, D)
        if args.rope is not None:
            bias = args.rope(bias, args.rope.prepare(positions))
        return bias[:, 0].astype(mx.float32)


@dataclass(slots=True, eq=False, kw_only=True)
class SharedAttention:
    """Attention over the keys and values of an earlier layer; only queries are its own.

    Attributes:
        source: the layer that stores keys and values, which has run before in the same step.
    """

    q_proj: Projection  # (R, hidden) -> (R, num_heads * head_dim)
    o_proj: Projection  # (R, num_heads * head_dim) -> (R, hidden)
    source: Attention
    q_norm: Norm | None  # over (R, num_heads, head_dim); None: no norm

    parts: ClassVar[Sequence[Mixer]] = ()  # it has no cache of its own

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (R, hidden) -> (R, hidden), plus the residual."""
        source = self.source.args
        queries = self.q_proj(x).reshape(x.shape[0], source.num_heads, -1)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        if source.rope is not None:
            queries = source.rope(queries, step.read_prepared[source.rope])
        cache = step.caches[self.source]
        return self.o_proj(cache.attend_again(queries, source.softmax, step.rows), residual)


LayerMixer = Mixer | ParallelMixers | SharedAttention
"""The mixer of a layer. It has a cache of its own, several of them, or none."""
