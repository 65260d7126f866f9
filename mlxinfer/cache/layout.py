"""From specs and options to layers of the cache: what each layer keeps, and in which format.

A spec names its class in `LAYERS`; nothing else tells kinds of layers apart.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx

from ..cache_specs import (
    BlockSpec,
    CacheSpec,
    CompressedSpec,
    KVSpec,
    LatentSpec,
    OwnCacheSpec,
    PooledSpec,
    StateSpec,
)
from ..config import KVOptions
from ..metal_kernels.attention_heads import Heads
from ..metal_kernels.kv_write_cases import kv_write_variant, tail_write_variant
from ..metal_kernels.stored import FORMATS, PLAIN
from ..metal_kernels.variants import ANY_ROWS, Fastest, KernelUse, ReadyFor, Variant
from .compressed import CompressedLayer
from .index import BlockIndexLayer
from .keys_values import KeyValueLayer
from .latent import LatentLayer
from .paged import Formats, PagedLayer, unrotated
from .pooled import PooledLayer
from .state import OwnCaches, SequenceLayer, StateLayer

LayerCache = PagedLayer | SequenceLayer

LAYERS: dict[type, Any] = {
    KVSpec: KeyValueLayer,
    LatentSpec: LatentLayer,
    PooledSpec: PooledLayer,
    CompressedSpec: CompressedLayer,
    BlockSpec: BlockIndexLayer,
    StateSpec: StateLayer,
    OwnCacheSpec: OwnCaches,
}


def paged_of(layers: Sequence[LayerCache]) -> list[PagedLayer]:
    return [cast(PagedLayer, layer) for layer in layers if layer.is_paged]


def sequence_layers(layers: Sequence[LayerCache]) -> list[SequenceLayer]:
    return [cast(SequenceLayer, layer) for layer in layers if not layer.is_paged]


def kernel_uses(pairs: Sequence[tuple[PagedLayer, Any]]) -> list[KernelUse]:
    """The Metal kernels of layers, each with its mixer; layers of the same kernel share its use."""
    short: dict[tuple[tuple[int, Variant], ...], list[PagedLayer]] = {}
    uses = []
    for layer, mixer in pairs:
        by_count = tuple(layer.attention_variants(mixer).items())
        if by_count:
            short.setdefault(by_count, []).append(layer)
        prefill, heads = layer.prefill_variant(mixer), layer.heads_of(mixer)
        if prefill is not None:
            install = partial(_install, [layer], "fastest_prompt")
            uses.append(KernelUse({ANY_ROWS: [prefill]}, install_fastest=install))
        if heads is not None:
            form, dtype = heads.form, layer.dtype
            variants = kv_write_variant(form, dtype), tail_write_variant(form, dtype)
            for kernel, variant in zip((_install_heads, _install_tails), variants, strict=True):
                uses.append(KernelUse({ANY_ROWS: [variant]}, partial(kernel, layer, heads)))
    for variants_of, alike in short.items():
        by_rows = {count: [variant] for count, variant in variants_of}
        fastest, install = partial(_install, alike, "fastest"), partial(_install, alike, "ready")
        uses.append(KernelUse(by_rows, install, install_fastest=fastest))
    return uses


def _install(layers: Sequence[PagedLayer], name: str, value: ReadyFor | Fastest) -> None:
    for layer in layers:
        setattr(layer, name, value)


def _install_heads(layer: PagedLayer, heads: Heads, ready: ReadyFor) -> None:
    layer.head_writer = heads if ready(1) else None


def _install_tails(layer: PagedLayer, heads: Heads, ready: ReadyFor) -> None:
    layer.writes_tails = ready(1)


NOT_QUANTISED: Formats = (PLAIN, PLAIN)


def lay_out(
    specs: Sequence[CacheSpec], options: KVOptions, *, dtype: mx.Dtype, key_bias: bool
) -> list[LayerCache]:
    """The layers of a cache, without arrays.

    Args:
        key_bias: whether the model adds biases to its keys, also in layers that do not say which.

    Raises:
        InvalidRequestError: the options do not suit the model.
    """
    kinds = [LAYERS[type(spec)] for spec in specs]
    formats: Formats = (FORMATS[options.bits[0]], FORMATS[options.bits[1]])
    windowed = [
        # A layer that was trained with a window keeps it.
        spec if options.window is None or spec.window is not None else kind.windowed(spec, options)
        for kind, spec in zip(kinds, specs, strict=True)
    ]
    if formats != NOT_QUANTISED:
        for kind, spec in zip(kinds, specs, strict=True):
            kind.check(spec, formats, key_bias=key_bias)
    if key_bias:
        formats = unrotated(formats)
    return [kind.of(spec, formats, dtype) for kind, spec in zip(kinds, windowed, strict=True)]
