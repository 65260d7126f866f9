"""The KV cache of a model, made as an engine's config asks for."""

from ..cache.formats import Bits, lay_out, stored_less_bias
from ..cache.kv import KVCache
from ..config import EngineConfig
from ..core import CacheSpec, KVSpec
from ..models.decoder import LanguageModel
from .kernels import Chooser, Kernels, choose_kernels

Layout = tuple[list[CacheSpec], list[Bits]]  # what each layer keeps, and in which format


def make_cache(
    model: LanguageModel, config: EngineConfig, layout: Layout, kernels: Kernels
) -> KVCache:
    """The KV cache of a model, as an engine of this config has it."""
    specs, bits = layout
    return KVCache(
        specs,
        bits=bits,
        dtype=model.activation_dtype,
        page_size=config.page_size,
        max_batch=config.max_batch,
        prefill_chunk=config.prefill_chunk,
        budget_bytes=config.kv_budget_bytes,
        num_pages=config.num_pages,
        kernel_layers=kernels.attention,
        prefill_layers=kernels.prefill,
        heads=kernels.heads,
        tail_layers=kernels.tails,
        key_biases={
            i: mixer.turned_bias
            for i, (mixer, spec) in enumerate(zip(model.mixers, specs, strict=True))
            if isinstance(spec, KVSpec) and stored_less_bias(spec, bits[i])
        },
    )


def cache_of(model: LanguageModel, config: EngineConfig, chooser: Chooser) -> KVCache:
    """The same without a loop: of a rank that others tell what to do."""
    layout = lay_out(model.cache_specs, config.kv, key_bias=model.config.qkv_bias)
    kernels = choose_kernels(model, *layout, chooser)
    kernels.put_into(model)
    return make_cache(model, config, layout, kernels)
