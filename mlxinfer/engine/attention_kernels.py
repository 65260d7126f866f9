"""Which Metal kernels serve the attention of each layer, by what the layer keeps and its format."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from ..cache.chunk_attention import FUSED_DIMS
from ..cache.formats import PLAIN, Bits, stored_less_bias
from ..core import CacheSpec, KVSpec, LatentSpec
from ..layers.attention import AttentionShape, Mixer
from ..layers.latent_attention import LatentAttention
from ..metal_kernels.attention_cases import mla_variant, paged_variant
from ..metal_kernels.attention_shape import threadgroup_shape
from ..metal_kernels.heads import MAX_DIM, Heads, has_joint
from ..metal_kernels.kv_write_cases import kv_write_variant, tail_write_variant
from ..metal_kernels.mla_attention import DIMS
from ..metal_kernels.paged_attention_passes import DTYPES, MAX_ROWS, has_dims
from ..metal_kernels.prefill_attention import tile_queries
from ..metal_kernels.prefill_cases import prefill_variant
from ..metal_kernels.variants import ANY_ROWS, KernelUse, ReadyFor, Variant
from .batch import MAX_SHORT


class AttentionKernels:
    """The kernels that the caches of a model's layers may use; none before they are installed.

    Args:
        mixers: of the layers.
        specs: what each layer keeps.
        bits: the format of each layer.
        dtype: of hidden states, keys and values.

    Attributes:
        attention: of layers with a kernel over pages, for how many query tokens it may be used.
        prefill: layers with a kernel for chunks of prompts.
        heads: of layers with a kernel that writes keys and values, how it does so.
        tails: of these, layers that write decoded tokens to tails.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer],
        specs: Sequence[CacheSpec],
        bits: Sequence[Bits],
        dtype: mx.Dtype,
    ) -> None:
        self._layers = list(zip(mixers, specs, bits, strict=True))
        self._dtype = dtype
        self.attention: dict[int, ReadyFor] = {}
        self.prefill: set[int] = set()
        self.heads: dict[int, Heads] = {}
        self._writes_tails: set[int] = set()

    @property
    def tails(self) -> frozenset[int]:
        """Layers that write decoded tokens to tails by a kernel."""
        return frozenset(self._writes_tails & self.heads.keys())

    def kernels(self) -> list[KernelUse]:
        """The kernels of all layers."""
        return [use for i, layer in enumerate(self._layers) for use in self._uses(i, *layer)]

    def _uses(self, index: int, mixer: Mixer, spec: CacheSpec, bits: Bits) -> list[KernelUse]:
        uses = []
        by_count = _attention_variants(self._dtype, mixer, spec, bits)
        if by_count:
            each = {count: [variant] for count, variant in by_count.items()}
            uses.append(KernelUse(each, partial(self.attention.__setitem__, index)))
        prefill = _prefill_variant(self._dtype, mixer, spec, bits)
        if prefill is not None:
            uses.append(_always(prefill, self.prefill, index))
        heads = _heads(mixer, spec, bits)
        if heads is not None:
            write = kv_write_variant(heads, self._dtype)
            uses.append(KernelUse({ANY_ROWS: [write]}, partial(self._write, index, heads)))
            into_tails = tail_write_variant(heads, self._dtype)
            uses.append(_always(into_tails, self._writes_tails, index))
        return uses

    def _write(self, index: int, heads: Heads, ready: ReadyFor) -> None:
        if ready(1):
            self.heads[index] = heads


def _always(variant: Variant, layers: set[int], index: int) -> KernelUse:
    """A kernel for any number of rows; the layer joins `layers` where it may be used."""

    def install(ready: ReadyFor) -> None:
        if ready(1):
            layers.add(index)

    return KernelUse({ANY_ROWS: [variant]}, install)


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
