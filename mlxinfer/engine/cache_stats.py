"""The numbers of a KV cache: what it holds, by layer group."""

from typing import Any

import mlx.core as mx

from ..cache.kv import KVCache
from ..cache.pages import StateGroup
from ..cache.prefix import PrefixCache


def cache_stats(cache: KVCache, prefix: PrefixCache) -> dict[str, Any]:
    """Bytes of the KV cache, by layer group, and of MLX."""
    groups = _group_stats(cache, prefix)
    return {
        "page_size": cache.page_size,
        "groups": groups,
        "kv_bytes_held": sum(g["pages_held"] * g["page_bytes"] for g in groups),
        "kv_bytes_cached": sum(g["pages_cached"] * g["page_bytes"] for g in groups),
        "kv_bytes_allocated": cache.bytes_allocated,
        "prompt_tokens_reused": prefix.tokens_reused,
        **_state_stats(cache.state_group),
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


def _state_stats(group: StateGroup | None) -> dict[str, int]:
    """Snapshots of the states of recurrent layers, where a model has such layers."""
    if group is None:
        return {}
    return {
        "state_bytes": group.num_bytes,  # of one sequence
        "snapshots": group.num_held,
        "max_snapshots": group.max_snapshots,
    }
