"""Which Metal kernels the steps of a model use: those that pass their self-check on this GPU.

Knows models, formats and variants. Plain MLX does the work of the others, and of all where there is
no Metal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from ..cache.chunk_attention import FUSED_DIMS
from ..cache.formats import PLAIN, Bits, stored_less_bias
from ..config import default_kernel_folder
from ..core import CacheSpec, KVSpec, LatentSpec
from ..layers.attention import AttentionShape, Mixer
from ..layers.latent_attention import LatentAttention
from ..metal_kernels.attention_cases import mla_variant, paged_variant
from ..metal_kernels.attention_shape import threadgroup_shape
from ..metal_kernels.gated import Gate
from ..metal_kernels.gated_cases import gated_variant
from ..metal_kernels.heads import MAX_DIM, Heads
from ..metal_kernels.kv_write_cases import kv_write_variant
from ..metal_kernels.mla_attention import DIMS, row_teams
from ..metal_kernels.paged_attention_passes import DTYPES, MAX_ROWS, has_dims
from ..metal_kernels.prefill_attention import tile_queries
from ..metal_kernels.prefill_cases import prefill_variant
from ..metal_kernels.sample import MAX_VOCAB
from ..metal_kernels.sampling_cases import bitmask_variant, sample_variant
from ..metal_kernels.selfcheck import choose, this_gpu
from ..metal_kernels.variants import Variant
from ..models.decoder import LanguageModel
from .batch import MAX_SHORT

Chooser = Callable[[Sequence[Variant]], frozenset[Variant]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The Metal kernels that may be used; by default none."""

    attention: frozenset[int] = frozenset()  # layers whose attention over pages has one
    prefill: frozenset[int] = frozenset()  # layers whose prefill chunks have one
    heads: dict[int, Heads] = field(default_factory=dict)  # by layer: of those that write with one
    gates: frozenset[Gate] = frozenset()  # activations that have one
    samples: bool = False
    masks: bool = False  # a mask operation, where sampling has no kernel

    def put_into(self, model: LanguageModel) -> None:
        """Let a model use those that are its own, and no others; one loop has it at a time."""
        for activation in model.activations:
            activation.in_kernel = activation.gate in self.gates


def choose_on_this_machine() -> Chooser:
    """Self-checked kernels on a Mac, none elsewhere; to be called on the thread that runs them."""
    return partial(choose, gpu=this_gpu(), folder=default_kernel_folder())


def choose_none(variants: Sequence[Variant]) -> frozenset[Variant]:
    """Plain MLX for everything."""
    return frozenset()


def choose_kernels(
    model: LanguageModel, specs: Sequence[CacheSpec], bits: Sequence[Bits], chooser: Chooser
) -> Kernels:
    """The kernels for a model, given what each layer keeps and in which format."""
    if chooser is choose_none:
        return Kernels()
    dtype = model.activation_dtype
    layers = list(zip(model.mixers, specs, bits, strict=True))
    attention = [_attention_variants(dtype, *layer) for layer in layers]
    prefill = [_prefill_variant(dtype, *layer) for layer in layers]
    heads = [_heads(*layer) for layer in layers]
    writing = [None if h is None else kv_write_variant(h, dtype) for h in heads]
    gates = {a.gate: gated_variant(a.gate) for a in model.activations if a.gate is not None}
    sampling = _sampling_variants(dtype, model.config.vocab_size)
    passed = chooser(
        [
            *(variant for some in attention for variant in some),
            *(variant for variant in (*prefill, *writing) if variant is not None),
            *gates.values(),
            *sampling,
        ]
    )
    return Kernels(
        attention=frozenset(i for i, some in enumerate(attention) if some and passed >= set(some)),
        prefill=frozenset(i for i, variant in enumerate(prefill) if variant in passed),
        heads={
            i: h
            for i, (h, variant) in enumerate(zip(heads, writing, strict=True))
            if h is not None and variant in passed
        },
        gates=frozenset(gate for gate, variant in gates.items() if variant in passed),
        samples=bool(sampling) and passed >= set(sampling[:-1]),
        masks=bool(sampling) and sampling[-1] in passed,
    )


def _attention_variants(
    dtype: mx.Dtype, mixer: Mixer, spec: CacheSpec, bits: Bits
) -> list[Variant]:
    """One for each threadgroup that 1 to 8 query tokens need; none where the sizes have no kernel.

    Token counts that share a threadgroup share the compiled kernel too.
    """
    if isinstance(mixer, LatentAttention) and isinstance(spec, LatentSpec):
        return _latent_variants(dtype, mixer.num_heads, spec, bits)
    if not isinstance(mixer, AttentionShape) or not isinstance(spec, KVSpec):
        return []
    if stored_less_bias(spec, bits) or spec.chunked:
        return []
    group = mixer.num_heads // spec.num_kv_heads
    if not has_dims(dtype, (spec.key_dim, spec.value_dim)):
        return []
    if group * MAX_SHORT > MAX_ROWS:
        return []
    counts = {
        threadgroup_shape(
            group * count,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            itemsize=dtype.size,
        ): count
        for count in range(1, MAX_SHORT + 1)
    }
    return [
        paged_variant(
            dtype,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            group=group,
            queries=count,
            key_bits=bits[0],
            value_bits=bits[1],
            sink_logits=mixer.sinks is not None,
        )
        for count in counts.values()
    ]


def _prefill_variant(dtype: mx.Dtype, mixer: Mixer, spec: CacheSpec, bits: Bits) -> Variant | None:
    """Attention of prompts in tiles, where MLX has none that is fused; None: it has, or no kernel.

    Codes count: MLX's attention takes them decoded, a whole context at once.
    """
    if not isinstance(mixer, AttentionShape) or not isinstance(spec, KVSpec):
        return None
    if stored_less_bias(spec, bits):
        return None
    dims, group = (spec.key_dim, spec.value_dim), mixer.num_heads // spec.num_kv_heads
    if not has_dims(dtype, dims) or not tile_queries(group, key_dim=dims[0], value_dim=dims[1]):
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
    )


def _latent_variants(
    dtype: mx.Dtype, num_heads: int, spec: LatentSpec, bits: Bits
) -> list[Variant]:
    """One for each number of row teams that 1 to 8 query tokens need."""
    dims = spec.latent_dim + spec.rope_dim, spec.latent_dim
    if dims not in DIMS or dtype not in DTYPES or bits[0] not in (None, 8):
        return []
    counts = {row_teams(num_heads * count): count for count in range(1, MAX_SHORT + 1)}
    return [
        mla_variant(dtype, num_heads=num_heads, queries=count, bits=bits[0])
        for count in counts.values()
    ]


def _heads(mixer: Mixer, spec: CacheSpec, bits: Bits) -> Heads | None:
    """What one kernel does to a layer's projection; None where it has no such sizes."""
    if not isinstance(mixer, AttentionShape) or not isinstance(spec, KVSpec):
        return None
    if stored_less_bias(spec, bits):
        return None
    dim = spec.key_dim
    if mixer.make_heads is None or dim != spec.value_dim or dim % 8 or dim > MAX_DIM:
        return None
    return mixer.make_heads(*bits)


def _sampling_variants(dtype: mx.Dtype, vocab_size: int) -> list[Variant]:
    """For logits as they are, without and with a mask; for adjusted ones; the mask alone."""
    if vocab_size > MAX_VOCAB:
        return []
    plain, masked = (sample_variant(dtype, masked=masked) for masked in (False, True))
    adjusted = sample_variant(mx.float32, masked=False)
    return [*dict.fromkeys([plain, masked, adjusted]), bitmask_variant(dtype)]
