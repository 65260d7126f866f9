"""An engine as plain values: what a request must fit into, what was done, what is held."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from ..cache.kv import KVCache
from ..config import EngineConfig
from ..core import Request, check_token_ids
from ..errors import ContextLengthError, InsufficientMemoryError, InvalidRequestError, shown
from ..memory import human_bytes
from .pagestore import PageStore
from .scheduler import Proposer, Scheduler

_ENDLESS = 2**31  # tokens; more than any context


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Pages of one layer group."""

    num_pages: int
    page_bytes: int
    max_pages: int  # that one sequence holds at once, however long it is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a request must fit into, for the threads of callers.

    The engine hands it over when it is ready, and a new one after each restart: nothing in it
    changes, and no caller reads the loop's own objects.
    """

    vocab_size: int
    page_size: int  # tokens
    max_context: int  # tokens of prompt and answer of one request
    max_positions: int  # that the KV cache holds of one sequence, if it runs alone
    groups: tuple[GroupLimits, ...]
    adapters: tuple[str, ...] = ()  # that requests may name

    @classmethod
    def of(
        cls, config: EngineConfig, vocab_size: int, cache: KVCache, adapters: tuple[str, ...] = ()
    ) -> "EngineLimits":
        """The limits of an engine with this config and cache."""
        return cls(
            vocab_size=vocab_size,
            adapters=adapters,
            page_size=config.page_size,
            max_context=config.max_context,
            max_positions=cache.max_tokens,
            groups=tuple(
                GroupLimits(
                    group.allocator.num_pages,
                    group.page_bytes,
                    group.max_pages(_ENDLESS),
                )
                for group in cache.groups
            ),
        )

    def check(self, request: Request) -> int:
        """How many tokens the answer of a request may have at most.

        Raises:
            InvalidRequestError, ContextLengthError, InsufficientMemoryError: it can never run.
        """
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequestError(
                "The prompt is empty; give at least one token.", param="prompt"
            )
        check_token_ids(request.prompt_ids, self.vocab_size, param="prompt")
        check_token_ids(request.stop_ids, self.vocab_size, param="stop_token_ids")
        request.params.check_vocabulary(self.vocab_size)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise no_adapter(request.adapter, self.adapters)
        room = self.max_context - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens, and the context holds "
                f"{self.max_context} with the answer; shorten the prompt.",
                param="prompt",
            )
        self.check_memory(num_prompt)
        max_tokens = request.params.max_tokens or room
        return min(max_tokens, room, self.max_positions - num_prompt)

    def check_memory(self, num_prompt: int) -> None:
        """Raise InsufficientMemoryError where the prompt and one token need too many pages."""
        for group in self.groups:
            needed = min(-(-(num_prompt + 1) // self.page_size), group.max_pages)
            if needed > group.num_pages:
                raise InsufficientMemoryError(
                    f"The prompt has {num_prompt} tokens and needs {needed} pages of KV cache "
                    f"({human_bytes(needed * group.page_bytes)}), and there are only "
                    f"{group.num_pages}; shorten it or raise max_memory.",
                    param="prompt",
                )


def no_adapter(name: str, loaded: Sequence[str]) -> InvalidRequestError:
    """The error of a request that names an adapter which is not loaded."""
    there = f"loaded: {', '.join(loaded)}" if loaded else "none is loaded"
    return InvalidRequestError(f"There is no adapter {shown(name)}; {there}.", param="adapter")


def stats_of(
    scheduler: Scheduler, cache: KVCache, store: PageStore | None, proposer: Proposer | None
) -> dict[str, Any]:
    """Counters, queues, and bytes of the KV cache by layer group."""
    groups = _groups(scheduler, cache)
    return {
        **asdict(scheduler.counters),
        "running": len(scheduler.queues.running),
        "waiting": len(scheduler.queues.waiting),
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
