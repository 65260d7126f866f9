"""What an engine has done and what it holds, as plain numbers. Changes nothing."""

from dataclasses import asdict
from typing import Any

import mlx.core as mx

from ..cache.kv import KVCache
from .pagestore import PageStore
from .queues import foreground
from .scheduler import Proposer, Scheduler


def stats_of(
    scheduler: Scheduler, cache: KVCache, store: PageStore | None, proposer: Proposer | None
) -> dict[str, Any]:
    """Counters, queues, and bytes of the KV cache by layer group."""
    groups = _groups(scheduler, cache)
    return {
        **asdict(scheduler.counters),
        "running": len(foreground(scheduler.queues.running)),
        "waiting": len(foreground(scheduler.queues.waiting)),
        "background": sum(s.background for s in scheduler.queues.unfinished()),
        "page_size": cache.page_size,
        "groups": groups,
        "kv_bytes_held": sum(g["pages_held"] * g["page_bytes"] for g in groups),
        "kv_bytes_cached": sum(g["pages_cached"] * g["page_bytes"] for g in groups),
        "kv_bytes_allocated": cache.bytes_allocated,
        "prompt_tokens_reused": scheduler.kv_manager.tree.counters.tokens_reused,
        **_states(cache),
        "bytes_copied": cache.bytes_copied,
        "bytes_grown": cache.bytes_grown,
        "peak_memory_bytes": mx.get_peak_memory(),
        "active_memory_bytes": mx.get_active_memory(),
        **({} if store is None else {"disk": store.stats()}),
        **({} if proposer is None else {"speculation": proposer.stats()}),
    }


def _states(cache: KVCache) -> dict[str, Any]:
    """Snapshots of the states of recurrent layers, where a model has such layers."""
    group = cache.state_group
    if group is None:
        return {}
    return {
        "state_bytes": group.num_bytes,  # of one sequence
        "snapshots": group.num_held,
        "max_snapshots": group.max_snapshots,
    }


def _groups(scheduler: Scheduler, cache: KVCache) -> list[dict[str, Any]]:
    tree = scheduler.kv_manager.tree
    return [
        {
            "window": group.window.size,
            "sinks": group.window.sinks,
            "layers": len(group.layers),
            "page_bytes": group.page_bytes,
            "pages": group.allocator.num_pages,
            "pages_cached": tree.num_evictable(index),
            "pages_held": group.allocator.num_held - tree.num_evictable(index),
        }
        for index, group in enumerate(cache.groups)
    ]
