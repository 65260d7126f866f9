"""The KV cache of a model: its layers, their kernels, what pages depend on, and its numbers."""

from collections.abc import Sequence as Seq
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from ..cache.kv import KVCache
from ..cache.layout import LayerCache, kernel_uses, lay_out, paged_of
from ..cache.paged import PagedLayer
from ..cache.prefix import PrefixCache
from ..config import EngineConfig
from ..layers.ranks import AbsentMixer
from ..metal_kernels.variants import KernelUse, dtype_name
from ..models.language import LanguageModel
from .kernels import Chooser, Kernels


def absent_layers(model: LanguageModel) -> set[int]:
    return {i for i, mixer in enumerate(model.mixers) if isinstance(mixer, AbsentMixer)}


def cache_layers(model: LanguageModel, config: EngineConfig) -> list[LayerCache]:
    """The layers of a model's cache, without arrays. Raises InvalidRequestError."""
    key_bias, dtype = model.config.qkv_bias, model.activation_dtype
    layers = lay_out(model.cache_specs, config.kv, dtype=dtype, key_bias=key_bias)
    for layer, mixer in _paged(model, layers):
        layer.take_from(mixer)
    return layers


def attention_kernels(model: LanguageModel, layers: Seq[LayerCache]) -> list[KernelUse]:
    return kernel_uses(_paged(model, layers))


def _paged(model: LanguageModel, layers: Seq[LayerCache]) -> list[tuple[PagedLayer, Any]]:
    absent = absent_layers(model)
    here = [i for i, layer in enumerate(layers) if layer.is_paged and i not in absent]
    mixers = model.mixers
    return list(zip(paged_of([layers[i] for i in here]), [mixers[i] for i in here], strict=True))


def make_cache(model: LanguageModel, config: EngineConfig, layers: Seq[LayerCache]) -> KVCache:
    return KVCache(
        layers,
        page_size=config.page_size,
        max_batch=config.max_batch,
        prefill_chunk=config.prefill_chunk,
        budget_bytes=config.kv_budget_bytes,
        num_pages=config.num_pages,
        absent=absent_layers(model),
    )


def cache_of(
    model: LanguageModel, config: EngineConfig, chooser: Chooser
) -> tuple[KVCache, Kernels]:
    """The KV cache of a rank without a loop, which runs the steps that rank 0 sends."""
    layers = cache_layers(model, config)
    kernels = Kernels([*model.kernels(), *attention_kernels(model, layers)], chooser)
    return make_cache(model, config, layers), kernels


def disk_identity(
    identity: str, model: LanguageModel, cache: KVCache, kernels: str, form: str
) -> tuple[str, ...]:
    """Pages of disk and peers are shared only between equal weights, versions and KV formats.

    Args:
        form: what part of a model spread over ranks this is; empty: it is not spread.
    """
    versions = f"mlxinfer {version('mlxinfer')} MLX {version('mlx')} {mx.default_device()}"
    return (
        identity,
        f"{versions}{model.config.definition_version} {kernels}",
        f"{cache.page_size} {dtype_name(model.activation_dtype)} {cache.identity}",
        *([form] if form else []),
    )


def cache_stats(cache: KVCache, prefix: PrefixCache) -> dict[str, Any]:
    groups, states = _group_stats(cache, prefix), cache.state_group
    of_states = {}
    if states is not None:
        of_states = {"state_bytes": states.num_bytes}  # of one sequence
        of_states |= {"snapshots": states.num_held, "max_snapshots": states.max_snapshots}
    return {
        "page_size": cache.page_size,
        "groups": groups,
        "kv_bytes_held": sum(g["pages_held"] * g["page_bytes"] for g in groups),
        "kv_bytes_cached": sum(g["pages_cached"] * g["page_bytes"] for g in groups),
        "kv_bytes_allocated": cache.bytes_allocated,
        "prompt_tokens_reused": prefix.tokens_reused,
        **of_states,
        "bytes_copied": cache.bytes_copied,
        "bytes_grown": cache.bytes_grown,
        "peak_memory_bytes": mx.get_peak_memory(),
        "active_memory_bytes": mx.get_active_memory(),
    }


def _group_stats(cache: KVCache, prefix: PrefixCache) -> list[dict[str, Any]]:
    return [
        {
            "window": group.window.size,
            "sinks": group.window.sinks,
            "layers": len(group.layers),
            "page_bytes": group.page_bytes,
            "pages": group.allocator.num_pages,
            "pages_cached": prefix.num_evictable(index),
            "pages_held": group.allocator.num_held - prefix.num_evictable(index),
        }
        for index, group in enumerate(cache.groups)
    ]
