"""A server without HTTP: prompts in, tokens out, and what was computed and held.

Both engines answer the same prompts through this, from one thread. What is counted is the same on
every machine: prompt tokens that were computed, and bytes of KV cache that were held.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from mlxinfer.config import EngineConfig, KVOptions
from mlxinfer.core import Request, SamplingParams, TokenEvent
from mlxinfer.engine.loop import Loop
from mlxinfer.models.decoder import Model

Clock = Callable[[], float]
Segment = tuple[str, list[int]]  # ("system" | "user" | "assistant", token ids)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt. Its segments are where a chat server knows that a reusable part ends."""

    name: str
    segments: list[Segment]
    max_tokens: int

    @property
    def prompt_ids(self) -> list[int]:
        """All segments in a row."""
        return list(chain.from_iterable(ids for _, ids in self.segments))


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    name: str
    token_id: int
    last: bool


class Server(Protocol):
    """An engine with its prompt cache."""

    prompt_tokens: int  # of all asks so far

    @property
    def prompt_tokens_computed(self) -> int:
        """Of these, those that no cache had. Padding is not counted."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Of KV cache held now: by running requests, and kept for later ones."""
        ...

    @property
    def running_bytes(self) -> int:
        """The part of it that running requests hold."""
        ...

    @property
    def tail_bytes(self) -> int:
        """The part of it that lies apart, for what steps in flight write."""
        ...

    def submit(self, ask: Ask) -> None:
        """Queue a prompt."""
        ...

    def step(self) -> list[Token]:
        """One turn; the tokens that it brought."""
        ...


@dataclass(slots=True)
class Answered:
    """What came of one ask."""

    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0  # from the moment that all asks were handed in


@dataclass(frozen=True, slots=True)
class Served:
    """Asks that arrived together, answered to the end."""

    answers: dict[str, Answered]
    prompt_tokens: int
    computed: int
    peak_kv_bytes: int
    seconds: float

    @property
    def mean_first_s(self) -> float:
        """Mean time to the first token."""
        return sum(a.first_s for a in self.answers.values()) / len(self.answers)

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers.values())


def serve(server: Server, asks: Sequence[Ask], clock: Clock = time.perf_counter) -> Served:
    """Hand in all asks at once and step until each is answered."""
    answers = {ask.name: Answered() for ask in asks}
    unfinished = set(answers)
    prompt_before, computed_before = server.prompt_tokens, server.prompt_tokens_computed
    started, peak = clock(), 0
    for ask in asks:
        server.submit(ask)
    while unfinished:
        tokens = server.step()
        now = clock() - started
        for token in tokens:
            answer = answers[token.name]
            answer.first_s = answer.first_s or now
            answer.token_ids.append(token.token_id)
            if token.last:
                unfinished.remove(token.name)
        peak = max(peak, server.kv_bytes)
    return Served(
        answers,
        server.prompt_tokens - prompt_before,
        server.prompt_tokens_computed - computed_before,
        peak,
        clock() - started,
    )


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
        """Pages that are held by requests or kept for reuse, and all tails."""
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
