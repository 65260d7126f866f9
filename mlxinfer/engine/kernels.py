"""Which Metal kernels the steps of a model use: those that passed their self-check on this GPU.

Knows models, formats and variants. What prefill and decode need is checked and compiled before the
first step. What odd shapes and speculation may need is asked for by the first step that could use
it, and is checked while nothing runs: nothing is compiled in the middle of an answer. Plain MLX
does the work of the others, and of all where there is no Metal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..cache.chunk_attention import FUSED_DIMS
from ..cache.formats import PLAIN, Bits, stored_less_bias
from ..cache.kernel_attention import ReadyFor
from ..config import default_kernel_folder
from ..core import CacheSpec, KVSpec, LatentSpec
from ..layers.attention import AttentionShape, Mixer
from ..layers.latent_attention import LatentAttention
from ..layers.recurrent import RecurrentMixer
from ..metal_kernels.add_norm import AddNorm, add_norm_variant, has_rows
from ..metal_kernels.attention_cases import mla_variant, paged_variant
from ..metal_kernels.attention_shape import threadgroup_shape
from ..metal_kernels.gate_up import MAX_ROWS as MAX_GATE_UP_ROWS
from ..metal_kernels.gate_up import GateUp, gate_up_variant, has_matrix
from ..metal_kernels.gated import Gate, gated_variant
from ..metal_kernels.heads import MAX_DIM, Heads, has_joint
from ..metal_kernels.kv_write_cases import kv_write_variant, tail_write_variant
from ..metal_kernels.mla_attention import DIMS
from ..metal_kernels.paged_attention_passes import DTYPES, MAX_ROWS, has_dims
from ..metal_kernels.prefill_attention import tile_queries
from ..metal_kernels.prefill_cases import prefill_variant
from ..metal_kernels.routing import Routing, has_experts, routing_variant
from ..metal_kernels.sample import MAX_VOCAB
from ..metal_kernels.sampling_cases import bitmask_variant, sample_variant
from ..metal_kernels.selfcheck import choose, this_gpu
from ..metal_kernels.state_cases import step_variant
from ..metal_kernels.variants import Variant, never
from ..models.language import LanguageModel
from .batch import MAX_SHORT

Chooser = Callable[[Sequence[Variant]], frozenset[Variant]]


class ReadyVariants:
    """The variants that may be used now.

    Args:
        chooser: checks variants and compiles those that may be used.
        when_idle: it is called for variants that are asked for by `prepare_next`; else at once.
    """

    def __init__(self, chooser: Chooser, *, when_idle: bool) -> None:
        self._chooser = chooser
        self._when_idle = when_idle
        self._ready: set[Variant] = set()
        self._known: set[Variant] = set()  # ready or refused
        self.asked: dict[Variant, None] = {}  # in order, until they are known

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Check and compile variants now."""
        new = [variant for variant in dict.fromkeys(variants) if variant not in self._known]
        if new:
            self._known.update(new)
            self._ready |= self._chooser(new)

    def prepare_next(self) -> None:
        """Check and compile the variant that was asked for first, if there is one."""
        for variant in self.asked:
            del self.asked[variant]
            return self.prepare([variant])

    def __contains__(self, variant: Variant) -> bool:
        """Whether a variant may be used now; what is not known yet is asked for."""
        if variant not in self._known:
            if self._when_idle:
                self.asked[variant] = None
                return False
            self.prepare([variant])
        return variant in self._ready

    def stats(self) -> dict[str, Any]:
        """Plain numbers."""
        refused = len(self._known) - len(self._ready)
        return {"ready": len(self._ready), "refused": refused, "asked": len(self.asked)}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The Metal kernels that a model may use; by default none."""

    variants: ReadyVariants
    attention: dict[int, ReadyFor] = field(default_factory=dict)  # by layer, over pages
    prefill: frozenset[int] = frozenset()  # layers with one for prefill chunks
    heads: dict[int, Heads] = field(default_factory=dict)  # by layer: of those that write with one
    tails: frozenset[int] = frozenset()  # of these: layers that write decoded tokens to tails
    steps: dict[int, ReadyFor] = field(default_factory=dict)  # by layer, of recurrences
    gates: frozenset[Gate] = frozenset()  # activations that have one
    gate_ups: dict[GateUp, ReadyFor] = field(default_factory=dict)  # by what they fold, of rows
    routings: frozenset[Routing] = frozenset()  # choices of experts that have one
    joins: frozenset[AddNorm] = frozenset()  # residual sums and norms that have one
    vocab_size: int = MAX_VOCAB + 1

    def put_into(self, model: LanguageModel) -> None:
        """Let a model use those that are its own, and no others; one loop has it at a time."""
        parts = model.replaceable
        for activation in parts.activations:
            activation.in_kernel = activation.gate in self.gates
        for mlp in parts.mlps:
            mlp.in_kernel = mlp.form if mlp.form in self.gate_ups else None
            mlp.ready = never if mlp.form is None else self.gate_ups.get(mlp.form, never)
        for index, mixer in enumerate(model.mixers):
            if isinstance(mixer, RecurrentMixer):
                mixer.ready = self.steps.get(index, never)
        for choice in parts.choices:
            taken = choice.routing in self.routings
            choice.kernel_dtype = model.activation_dtype if taken else None
        for join in parts.joins:
            join.in_kernel = join.form if join.form in self.joins else None

    def samples(self, dtype: mx.Dtype, *, masked: bool) -> bool:
        """Whether one samples from logits of this dtype, with or without a grammar's mask."""
        return self.vocab_size <= MAX_VOCAB and sampling(dtype, masked) in self.variants

    def masks(self, dtype: mx.Dtype) -> bool:
        """Whether one applies masks to logits of this dtype."""
        return self.vocab_size <= MAX_VOCAB and masking(dtype) in self.variants


@cache
def sampling(dtype: mx.Dtype, masked: bool) -> Variant:
    """The kernel that samples."""
    return sample_variant(dtype, masked=masked)


@cache
def masking(dtype: mx.Dtype) -> Variant:
    """The kernel that applies masks."""
    return bitmask_variant(dtype)


def choose_on_this_machine() -> Chooser:
    """Self-checked kernels on a Mac, none elsewhere; to be called on the thread that runs them."""
    gpu = this_gpu()
    if gpu is None:
        return choose_none
    return partial(choose, gpu=gpu, folder=default_kernel_folder())


def choose_none(variants: Sequence[Variant]) -> frozenset[Variant]:
    """Plain MLX for everything."""
    return frozenset()


def choose_kernels(
    model: LanguageModel,
    specs: Sequence[CacheSpec],
    bits: Sequence[Bits],
    chooser: Chooser,
    *,
    when_idle: bool = False,
) -> Kernels:
    """The kernels for a model, given what each layer keeps and in which format.

    Args:
        when_idle: what the first steps can do without is checked by
            `Kernels.variants.prepare_next`, once it was asked for.
    """
    variants = ReadyVariants(chooser, when_idle=when_idle)
    if chooser is choose_none:
        return Kernels(variants)
    dtype, vocab_size = model.activation_dtype, model.config.vocab_size
    parts = model.replaceable
    layers = list(zip(model.mixers, specs, bits, strict=True))
    attention = [_attention_variants(dtype, *layer) for layer in layers]
    prefill = [_prefill_variant(dtype, *layer) for layer in layers]
    heads = [_heads(*layer) for layer in layers]
    writing = [None if h is None else kv_write_variant(h, dtype) for h in heads]
    into_tails = [None if h is None else tail_write_variant(h, dtype) for h in heads]
    gates = {a.gate: gated_variant(a.gate) for a in parts.activations if a.gate is not None}
    gate_ups = _gate_up_variants(model)
    steps = [_step_variants(mixer) for mixer in model.mixers]
    decode = [by_count.get(1) for by_count in attention]
    decode += [variant for by_count in steps for variant in by_count.get(1, ())]
    decode += [by_rows[1] for by_rows in gate_ups.values()]
    routings = _routing_variants(model)
    joins = _join_variants(model)
    other = *writing, *into_tails, *gates.values(), *routings.values(), *joins.values()
    needed = [v for v in (*decode, *prefill, *other) if v is not None]
    variants.prepare([*needed, *([sampling(dtype, False)] if vocab_size <= MAX_VOCAB else [])])
    ready_for = {tuple(each.items()): _ready_for(each, variants) for each in attention}
    ready = {i for i, variant in enumerate(writing) if _is_ready(variant, variants)}
    return Kernels(
        variants,
        attention={i: ready_for[tuple(each.items())] for i, each in enumerate(attention) if each},
        prefill=frozenset(i for i, v in enumerate(prefill) if _is_ready(v, variants)),
        heads={i: h for i, h in enumerate(heads) if h is not None and i in ready},
        tails=frozenset(i for i in ready if _is_ready(into_tails[i], variants)),
        steps={i: _all_ready(each, variants) for i, each in enumerate(steps) if each},
        gates=frozenset(gate for gate, variant in gates.items() if variant in variants),
        gate_ups={form: _ready_for(by_rows, variants) for form, by_rows in gate_ups.items()},
        routings=frozenset(how for how, variant in routings.items() if variant in variants),
        joins=frozenset(form for form, variant in joins.items() if variant in variants),
        vocab_size=vocab_size,
    )


def _gate_up_variants(model: LanguageModel) -> dict[GateUp, dict[int, Variant]]:
    """The kernels for products with gate and up, by number of rows."""
    found = {mlp.form for mlp in model.replaceable.mlps}
    return {
        form: {rows: gate_up_variant(form, rows) for rows in range(1, MAX_GATE_UP_ROWS + 1)}
        for form in found
        if form is not None and form.gate.dtype == model.activation_dtype and has_matrix(form)
    }


def _routing_variants(model: LanguageModel) -> dict[Routing, Variant]:
    """The kernels for a model's choices of experts; those that have none are left out."""
    count, dtype = model.config.num_experts, model.activation_dtype
    choices = model.replaceable.choices
    found = {choice.routing for choice in choices if choice.routing is not None}
    return {how: routing_variant(how, count, dtype) for how in found if has_experts(count, how)}


def _join_variants(model: LanguageModel) -> dict[AddNorm, Variant]:
    """The kernels for a model's residual sums and norms.

    Where weights are not quantised a product adds the residual as it goes: then the kernel saves
    nothing, unless what is added is normed.
    """
    quantized = model.config.quantization is not None
    joins = model.replaceable.joins
    found = {join.form for join in joins if quantized or join.after is not None}
    return {
        form: add_norm_variant(form)
        for form in found
        if form is not None and form.dtype == model.activation_dtype and has_rows(form)
    }


def _is_ready(variant: Variant | None, variants: ReadyVariants) -> bool:
    return variant is not None and variant in variants


def _ready_for(by_count: Mapping[int, Variant], variants: ReadyVariants) -> ReadyFor:
    admitted: set[int] = set()  # what is ready stays so, and every layer of a step calls this

    def ready(count: int) -> bool:
        if count not in admitted and _is_ready(by_count.get(count), variants):
            admitted.add(count)
        return count in admitted

    return ready


def _all_ready(by_count: Mapping[int, Sequence[Variant]], variants: ReadyVariants) -> ReadyFor:
    def ready(count: int) -> bool:
        asked = [variant in variants for variant in by_count.get(count, ())]
        return bool(asked) and all(asked)

    return ready


def _step_variants(mixer: Mixer) -> dict[int, list[Variant]]:
    """By number of tokens, 1 to 8, the kernels that together do the work of a recurrence."""
    if not isinstance(mixer, RecurrentMixer):
        return {}
    found = {}
    for counts in (range(1, 2), range(2, MAX_SHORT + 1)):
        own = [step_variant(form, counts[-1]) for form in mixer.forms]
        variants = [variant for variant in own if variant is not None]
        if len(variants) == len(own):
            found.update(dict.fromkeys(counts, variants))
    return found


def _attention_variants(
    dtype: mx.Dtype, mixer: Mixer, spec: CacheSpec, bits: Bits
) -> dict[int, Variant]:
    """By number of query tokens, 1 to 8; those that have no kernel are left out.

    Numbers that share a threadgroup share the compiled kernel, and so the variant.
    """
    if isinstance(mixer, LatentAttention) and isinstance(spec, LatentSpec):
        return _latent_variants(dtype, mixer.num_heads, spec, bits)
    if not isinstance(mixer, AttentionShape) or not isinstance(spec, KVSpec):
        return {}
    if stored_less_bias(spec, bits) or spec.chunked:
        return {}
    group = mixer.num_heads // spec.num_kv_heads
    if not has_dims(dtype, (spec.key_dim, spec.value_dim), spec.joint_dim):
        return {}
    sizes = {"key_dim": spec.key_dim, "value_dim": spec.value_dim}
    shapes = {
        count: threadgroup_shape(group * count, **sizes, itemsize=dtype.size)
        for count in range(1, MAX_SHORT + 1)
        if group * count <= MAX_ROWS
    }
    most = {shape: count for count, shape in shapes.items()}
    return {
        count: paged_variant(
            dtype,
            **sizes,
            group=group,
            queries=most[shape],
            key_bits=bits[0],
            value_bits=bits[1],
            sink_logits=mixer.sinks is not None,
            joint_dim=spec.joint_dim,
        )
        for count, shape in shapes.items()
    }


def _prefill_variant(dtype: mx.Dtype, mixer: Mixer, spec: CacheSpec, bits: Bits) -> Variant | None:
    """Attention of prompts in tiles, where MLX has none that is fused; None: it has, or no kernel.

    Codes count: MLX's attention takes them decoded, a whole context at once.
    """
    if isinstance(mixer, LatentAttention) and isinstance(spec, LatentSpec):
        return _expanded_variant(dtype, mixer, spec)
    if not isinstance(mixer, AttentionShape) or not isinstance(spec, KVSpec):
        return None
    if stored_less_bias(spec, bits):
        return None
    dims, group = (spec.key_dim, spec.value_dim), mixer.num_heads // spec.num_kv_heads
    if not has_dims(dtype, dims, spec.joint_dim) or not tile_queries(
        group, key_dim=dims[0], value_dim=dims[1]
    ):
        return None
    if bits == PLAIN and spec.window is None and dims[0] == dims[1] and dims[0] in FUSED_DIMS:
        return None
    return prefill_variant(
        dtype,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        group=group,
        key_bits=bits[0],
        value_bits=bits[1],
        sink_logits=mixer.sinks is not None,
        joint_dim=spec.joint_dim,
    )


def _expanded_variant(dtype: mx.Dtype, mixer: LatentAttention, spec: LatentSpec) -> Variant | None:
    """Attention of prompts over expanded latents, block by block; None: no kernel."""
    dims = mixer.projection.key_dim + spec.rope_dim, mixer.projection.value_dim
    if spec.window is not None or not has_dims(dtype, dims):
        return None
    return prefill_variant(dtype, key_dim=dims[0], value_dim=dims[1], group=1, log_sums=True)


def _latent_variants(
    dtype: mx.Dtype, num_heads: int, spec: LatentSpec, bits: Bits
) -> dict[int, Variant]:
    """As `_attention_variants`; one of tokens that decode, one of tokens under verification."""
    dims = spec.latent_dim + spec.rope_dim, spec.latent_dim
    if dims not in DIMS or dtype not in DTYPES or bits[0] not in (None, 8):
        return {}
    several = mla_variant(dtype, num_heads=num_heads, queries=MAX_SHORT, bits=bits[0])
    one = mla_variant(dtype, num_heads=num_heads, bits=bits[0])
    return {1: one, **dict.fromkeys(range(2, MAX_SHORT + 1), several)}


def _heads(mixer: Mixer, spec: CacheSpec, bits: Bits) -> Heads | None:
    """What one kernel does to a layer's projection; None where it has no such sizes."""
    if not isinstance(mixer, AttentionShape) or not isinstance(spec, KVSpec):
        return None
    if stored_less_bias(spec, bits):
        return None
    if mixer.make_heads is None:
        return None
    if spec.joint_dim and not has_joint(spec.key_dim, spec.turning, bits):
        return None
    dim = spec.key_dim
    if dim != spec.value_dim or dim % 8 or dim > MAX_DIM:
        return None
    return mixer.make_heads(*bits, spec.turning)
