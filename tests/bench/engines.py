"""An engine without HTTP and text: prompts in, tokens out, and what was computed, held and spent.

`OurEngine` here and `PeerEngine` (`peer.py`) answer the same prompts, turn by turn from one thread:
the engine is measured, not the queue in front of it. What is counted is the same on every machine.
`Meter` counts CPU time of that thread, without waiting, other threads and other processes, so the
figures are steady on a busy machine. On the CPU backend arithmetic runs on threads of MLX, which
are not counted.
"""

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any, Protocol, cast
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer.config import EngineConfig, KVOptions
from mlxinfer.core import Grammar, Request, SamplingParams, TokenEvent
from mlxinfer.engine import loop, runner
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.engine.loop import Loop
from mlxinfer.layers.step import Step
from mlxinfer.models.decoder import Model

Clock = Callable[[], float]
Evaluation = Callable[..., Any]
Segment = tuple[str, list[int]]  # ("system" | "user" | "assistant", token ids)
FORWARD = "forward"  # building the graph of the model: calls, attention, logits
PLAN = "plan"  # what the KV cache works out before the forward pass
DISPATCH = "dispatch"  # mx.eval and mx.async_eval: handing the graph to the backend
ENDLESS = SamplingParams(max_tokens=1 << 14, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt. Its segments are where a chat server knows that a reusable part ends."""

    name: str
    segments: list[Segment]
    params: SamplingParams

    @classmethod
    def of(cls, name: str, prompt_ids: list[int], max_tokens: int) -> "Ask":
        """A greedy request of one message that is answered with so many tokens."""
        return cls(name, [("user", prompt_ids)], greedy(max_tokens))

    @property
    def prompt_ids(self) -> list[int]:
        """All segments in a row."""
        return list(chain.from_iterable(ids for _, ids in self.segments))


def greedy(max_tokens: int) -> SamplingParams:
    """Settings of an answer that has exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    name: str
    token_id: int
    last: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Forward passes, and the tokens that they computed, padding included."""

    passes: int = 0
    rows: int = 0

    def since(self, earlier: "Work") -> "Work":
        """The work that came on top."""
        return Work(self.passes - earlier.passes, self.rows - earlier.rows)


class Engine(Protocol):
    """An engine with its prompt cache, under measurement."""

    meter: "Meter"
    prompt_tokens: int  # of all asks so far

    @property
    def prompt_tokens_computed(self) -> int:
        """Prompt tokens that no cache had. Padding is not counted."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache held now: by running requests, and kept for later ones."""
        ...

    @property
    def running_bytes(self) -> int:
        """The part of `kv_bytes` that running requests hold."""
        ...

    @property
    def tail_bytes(self) -> int:
        """The part of `kv_bytes` that lies apart, for what steps in flight write."""
        ...

    @property
    def done(self) -> Work:
        """All work of which `step` has returned the tokens."""
        ...

    def store_model(self) -> None:
        """Let the model return what it returned last: everything but the model is measured."""
        ...

    def submit(self, ask: Ask) -> None:
        """Queue a prompt."""
        ...

    def step(self) -> list[Token]:
        """Take one turn; return the tokens that it brought."""
        ...


# -- running ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Answered:
    """The answer to one ask."""

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
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers.values())


def serve(engine: Engine, asks: Sequence[Ask], clock: Clock = time.perf_counter) -> Served:
    """Hand in all asks at once and step until each is answered."""
    answers = {ask.name: Answered() for ask in asks}
    unfinished = set(answers)
    prompt_before, computed_before = engine.prompt_tokens, engine.prompt_tokens_computed
    started, peak = clock(), 0
    for ask in asks:
        engine.submit(ask)
    while unfinished:
        tokens = engine.step()
        now = clock() - started
        for token in tokens:
            answer = answers[token.name]
            answer.first_s = answer.first_s or now
            answer.token_ids.append(token.token_id)
            if token.last:
                unfinished.remove(token.name)
        peak = max(peak, engine.kv_bytes)
    return Served(
        answers,
        engine.prompt_tokens - prompt_before,
        engine.prompt_tokens_computed - computed_before,
        peak,
        clock() - started,
    )


def until_decoding(engine: Engine, asks: Sequence[Ask]) -> None:
    """Submit all and step until every request has a token: no prefill is left."""
    for ask in asks:
        engine.submit(ask)
    waiting = {ask.name for ask in asks}
    while waiting:
        waiting -= {token.name for token in engine.step()}


# -- metering ---------------------------------------------------------------------------------


class Meter:
    """Seconds of the calling thread's CPU time by account."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, account: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `account`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[account] += time.thread_time() - started

        return measured


def metered_evaluation(meter: Meter) -> AbstractContextManager[None]:
    """Count the time inside mx.eval and mx.async_eval, from any caller."""
    return _listening(lambda function: meter.timed(DISPATCH, function))


@contextmanager
def counted_operations() -> Iterator[list[int]]:
    """How many operations each graph has that is evaluated meanwhile."""
    counts: list[int] = []

    def counted(function: Evaluation) -> Evaluation:
        def count(*arrays: Any) -> None:
            text = io.StringIO()
            mx.export_to_dot(text, *[array for _, array in tree_flatten(arrays)])
            counts.append(text.getvalue().count("label ="))
            function(*arrays)

        return count

    with _listening(counted):
        yield counts


@contextmanager
def _listening(around: Callable[[Evaluation], Evaluation]) -> Iterator[None]:
    """Wrap mx.eval and mx.async_eval, which both libraries look up at each call."""
    with (
        patch.object(mx, "eval", around(mx.eval)),
        patch.object(mx, "async_eval", around(mx.async_eval)),
    ):
        yield


@contextmanager
def engine_clock(clock: Clock) -> Iterator[None]:
    """Steps are timed by this clock."""
    time = SimpleNamespace(monotonic=clock)
    with patch.object(loop, "time", time), patch.object(runner, "time", time):
        yield


# -- mlxinfer ---------------------------------------------------------------------------------


class MeteredModel:
    """A model that counts its calls, their rows and their time."""

    def __init__(self, model: Model, meter: Meter) -> None:
        self.config = model.config
        self.cache_specs, self.mixers = model.cache_specs, model.mixers
        self.activation_dtype = model.activation_dtype
        self.rope_variant = model.rope_variant
        self.kernels = model.kernels
        self.lacks = model.lacks
        self.work = Work()
        self.storing = False
        self._hidden: mx.array | None = None
        self._logits: mx.array | None = None
        self._forward = meter.timed(FORWARD, model)
        self._head = meter.timed(FORWARD, model.logits)

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """One step over (T,) tokens."""
        self.work = Work(self.work.passes + 1, self.work.rows + ids.shape[0])
        if self._hidden is None or len(self._hidden) != len(ids):
            hidden = self._forward(ids, step)
            if not self.storing:
                return hidden
            mx.eval(hidden)
            self._hidden, self._logits = hidden, None
        return self._hidden

    def logits(self, hidden: mx.array, adapters: Any = None) -> mx.array:
        """hidden (R, hidden_size) -> (R, vocab)."""
        if self._logits is None or len(self._logits) != len(hidden):
            logits = self._head(hidden, adapters)
            if not self.storing:
                return logits
            mx.eval(logits)
            self._logits = logits
        return self._logits


class OurEngine:
    """mlxinfer's loop, with its defaults but for what is given.

    Args:
        model: evaluated and ready.
        max_batch: requests that run at once.
        prefill_chunk: prompt tokens a step at most.
        prefill_slice_s: seconds of a step's prompts beside answers; None: `prefill_chunk` fixed.
        num_pages: of KV cache; None: as many as 8 GB hold.
        kv: how the KV cache is kept.
        launch_ahead: as the engine does.
        kernels: says which Metal kernels are used.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = 64,
        prefill_chunk: int = 256,
        prefill_slice_s: float | None = None,
        num_pages: int | None = None,
        kv: KVOptions | None = None,
        launch_ahead: bool = True,
        kernels: Chooser = choose_none,
    ) -> None:
        self.meter = Meter()
        self.prompt_tokens = 0
        self.done = Work()
        self._launch_ahead = launch_ahead
        self._model = MeteredModel(model, self.meter)
        self._tokens: list[Token] = []
        config = EngineConfig(
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            prefill_slice_s=prefill_slice_s,
            max_context=model.config.max_context,
            kv_budget_bytes=1 << 33,
            num_pages=num_pages,
            kv=kv or KVOptions(),
            launch_ahead=launch_ahead,
        )
        self.loop = Loop(cast(Model, self._model), config, self._take, kernels=kernels)
        cache = self.loop.cache
        cache.begin_step = self.meter.timed(PLAN, cache.begin_step)  # type: ignore[method-assign]

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
        return sum(pool.tail_bytes for pool in self.loop.cache.paged)

    @property
    def launched(self) -> Work:
        """All work that was started."""
        return self._model.work

    def store_model(self) -> None:
        """Compute once more, then no more."""
        self._model.storing = True

    def submit(self, ask: Ask, grammar: Grammar | None = None) -> None:
        """Queue a prompt."""
        request = Request(ask.name, ask.prompt_ids, ask.params, grammar=grammar)
        self.prompt_tokens += len(request.prompt_ids)
        self.loop.add(request, self.loop.check(request))

    def step(self) -> list[Token]:
        """Launch a step, read the one before."""
        self._tokens = []
        launched_before = self._model.work
        self.loop.turn()
        self.done = launched_before if self._launch_ahead else self._model.work
        return self._tokens

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.error is not None:
                raise event.error
            if event.token_id is not None:
                self._tokens.append(
                    Token(event.request_id, event.token_id, event.finish_reason is not None)
                )
