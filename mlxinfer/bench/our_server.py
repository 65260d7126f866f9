"""mlxinfer's loop as a server without HTTP, driven turn by turn. Knows no threads and no text."""

from ..config import EngineConfig, KVOptions
from ..core import Request, SamplingParams, TokenEvent
from ..engine.loop import Loop
from ..models.decoder import Model
from .served import Ask, Token


class OurServer:
    """mlxinfer's loop, with its defaults but for what is given.

    Args:
        model: evaluated and ready.
        max_batch: requests that run at once.
        prefill_chunk: prompt tokens a step.
        num_pages: of KV cache; None: it grows as needed, up to 8 GB.
        kv: how the KV cache is kept.
        launch_ahead: as the engine does.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = 64,
        prefill_chunk: int = 256,
        num_pages: int | None = None,
        kv: KVOptions | None = None,
        launch_ahead: bool = True,
    ) -> None:
        config = EngineConfig(
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            max_context=model.config.max_context,
            kv_budget_bytes=1 << 33,
            num_pages=num_pages,
            kv=kv or KVOptions(),
            launch_ahead=launch_ahead,
        )
        self.prompt_tokens = 0
        self.loop = Loop(model, config, self._take)
        self._tokens: list[Token] = []

    @property
    def prompt_tokens_computed(self) -> int:
        """Prompt tokens that went through the model."""
        return self.loop.scheduler.counters.prompt_tokens_computed

    @property
    def kv_bytes(self) -> int:
        """Pages that somebody holds or that are kept for reuse, and all tails."""
        cache = self.loop.cache
        pages = sum(group.allocator.num_held * group.page_bytes for group in cache.groups)
        return pages + self.tail_bytes

    @property
    def running_bytes(self) -> int:
        """Pages that running requests hold, and all tails."""
        tree = self.loop.scheduler.kv_manager.tree
        groups = enumerate(self.loop.cache.groups)
        kept = sum(tree.num_evictable(g) * group.page_bytes for g, group in groups)
        return self.kv_bytes - kept

    @property
    def tail_bytes(self) -> int:
        """Of all tails, used or not."""
        return sum(pool.tail_bytes for pool in self.loop.cache.pools)

    def submit(self, ask: Ask) -> None:
        """Queue a prompt."""
        params = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
        request = Request(ask.name, ask.prompt_ids, params)
        self.prompt_tokens += len(request.prompt_ids)
        self.loop.add(request, self.loop.check(request))

    def step(self) -> list[Token]:
        """Launch a step, read the one before."""
        self._tokens = []
        self.loop.turn()
        return self._tokens

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.error is not None:
                raise event.error
            if event.token_id is not None:
                self._tokens.append(
                    Token(event.request_id, event.token_id, event.finish_reason is not None)
                )
