"""The numbers of an engine: what was done, and what is held."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.pages import StateGroup

if TYPE_CHECKING:
    from .loop import Loop


def engine_stats(loop: "Loop") -> dict[str, Any]:
    """Plain numbers; those of parts that the model or its options lack are left out."""
    stats = {**asdict(loop.scheduler.counters), **_queue_stats(loop), **_cache_stats(loop)}
    if loop.store is not None and loop.config.disk:
        stats["disk"] = loop.store.stats()
    if loop.peers is not None:
        stats["peers"] = loop.peers.stats()
    if loop.proposer is not None:
        stats["speculation"] = loop.proposer.stats()
    stats["adapters"], stats["adapter_bytes"] = loop.adapters.stats(), loop.adapters.num_bytes
    if ranks := loop.followers.stats():
        stats["ranks"] = ranks
    if loop.model.tower is not None:
        stats["pictures"] = loop.features.stats()
    if loop.model.expert_store is not None:
        stats["experts"] = loop.model.expert_store.stats()
    return {**stats, "kernels": loop.kernels.stats()}


def _queue_stats(loop: "Loop") -> dict[str, int]:
    queues = loop.scheduler.queues
    return {
        "running": len(queues.running),
        "waiting": sum(sequence.fetch is None for sequence in queues.waiting),
    }


def _cache_stats(loop: "Loop") -> dict[str, Any]:
    """Bytes of the KV cache, by layer group, and of MLX."""
    cache, groups = loop.cache, _group_stats(loop)
    return {
        "page_size": cache.page_size,
        "groups": groups,
        "kv_bytes_held": sum(g["pages_held"] * g["page_bytes"] for g in groups),
        "kv_bytes_cached": sum(g["pages_cached"] * g["page_bytes"] for g in groups),
        "kv_bytes_allocated": cache.bytes_allocated,
        "prompt_tokens_reused": loop.scheduler.kv_manager.prefix.tokens_reused,
        **_state_stats(cache.state_group),
        "bytes_copied": cache.bytes_copied,
        "bytes_grown": cache.bytes_grown,
        "peak_memory_bytes": mx.get_peak_memory(),
        "active_memory_bytes": mx.get_active_memory(),
    }


def _group_stats(loop: "Loop") -> list[dict[str, Any]]:
    prefix = loop.scheduler.kv_manager.prefix
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
        for index, group in enumerate(loop.cache.groups)
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
