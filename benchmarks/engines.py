"""An engine without HTTP and text: prompts in, tokens out, and what was computed, held and spent.

`OurEngine` and `PeerEngine` answer the same prompts, turn by turn from one thread: the engine is
measured, not the queue in front of it. What is counted is the same on every machine. `Meter` counts
CPU time of that thread, without waiting, other threads and other processes, so the figures are
steady on a busy machine. On the CPU backend arithmetic runs on threads of MLX, which are not
counted.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx

from mlxinfer.bench.peer import load_peer_model, peer_module
from mlxinfer.config import EngineConfig
from mlxinfer.core import FinishReason, Request, SamplingParams, TokenEvent
from mlxinfer.engine import loop, runner
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.engine.loop import Loop
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

Clock = Callable[[], float]
CLOCKS: dict[bool, Clock] = {False: time.perf_counter, True: time.process_time}  # by --cpu-time
Segment = tuple[str, list[int]]  # ("system" | "user" | "assistant", token ids)
FORWARD = "forward"  # building the graph of the model: calls, attention, logits
PLAN = "plan"  # what the KV cache works out before the forward pass
DISPATCH = "dispatch"  # mx.eval and mx.async_eval: handing the graph to the backend
ENDLESS = SamplingParams(max_tokens=1 << 14, ignore_eos=True)
MODEL_KEY = "model"  # of mlx-lm's prompt cache


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt. Its segments are where a chat server knows that a reusable part ends."""

    name: str
    segments: list[Segment]
    params: SamplingParams

    @classmethod
    def of(cls, name: str, prompt_ids: list[int], max_tokens: int | None = None) -> "Ask":
        """A greedy request of one message; `max_tokens` are answered, or without end (None)."""
        params = ENDLESS if max_tokens is None else greedy(max_tokens)
        return cls(name, [("user", prompt_ids)], params)

    @property
    def prompt_ids(self) -> list[int]:
        """All segments in a row."""
        return list(chain.from_iterable(ids for _, ids in self.segments))


def greedy(max_tokens: int) -> SamplingParams:
    """Settings of an answer that has exactly this number of tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Work:
    """Forward passes, and the tokens that they computed, padding included."""

    passes: int = 0
    rows: int = 0

    def since(self, earlier: "Work") -> "Work":
        """The work that came on top."""
        return Work(self.passes - earlier.passes, self.rows - earlier.rows)


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

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Count the time inside mx.eval and mx.async_eval, which both libraries look up."""
        with (
            patch.object(mx, "eval", self.timed(DISPATCH, mx.eval)),
            patch.object(mx, "async_eval", self.timed(DISPATCH, mx.async_eval)),
        ):
            yield


class Replayed:
    """A function of a model: counted, timed, and while `storing` computed once for each shape."""

    def __init__(self, function: Callable[..., mx.array], meter: Meter) -> None:
        self.work = Work()
        self.storing = False
        self._function = meter.timed(FORWARD, function)
        self._kept: dict[tuple[int, ...], mx.array] = {}

    def __call__(self, x: mx.array, *rest: Any, **how: Any) -> mx.array:
        """The function's array; it is the stored one, whatever x holds, once there is one."""
        self.work = Work(self.work.passes + 1, self.work.rows + x.size)
        if x.shape in self._kept:
            return self._kept[x.shape]
        result: mx.array = self._function(x, *rest, **how)
        if self.storing:
            mx.eval(result)
            self._kept = {x.shape: result}
        return result


class MeteredModel:
    """A model of either side with its forward pass replayed, and `logits` where it has them."""

    logits: Replayed

    def __init__(self, model: Any, meter: Meter) -> None:
        self._model = model
        self.forward = Replayed(model, meter)

    def __call__(self, ids: mx.array, *rest: Any, **how: Any) -> mx.array:
        """One step; ids (T,), or (B, L) on mlx-lm's side."""
        return self.forward(ids, *rest, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def engine_clock(clock: Clock) -> Iterator[None]:
    """Steps are timed by this clock."""
    time = SimpleNamespace(monotonic=clock)
    with patch.object(loop, "time", time), patch.object(runner, "time", time):
        yield


# -- mlxinfer ---------------------------------------------------------------------------------


class OurEngine:
    """mlxinfer's loop, with its defaults but for what is given.

    Args:
        model: evaluated and ready.
        kernels: says which Metal kernels are used.
        config: fields of EngineConfig, which has their defaults.

    Attributes:
        prompt_tokens: of all asks so far.
        done: all work of which `step` has returned the tokens.
    """

    def __init__(self, model: Model, *, kernels: Chooser = choose_none, **config: Any) -> None:
        self.meter = Meter()
        self.prompt_tokens = 0
        self.done = Work()
        self._model = MeteredModel(model, self.meter)
        self._model.logits = Replayed(model.logits, self.meter)
        self._tokens: list[TokenEvent] = []
        most = model.config.max_context
        self._config = EngineConfig(max_context=most, kv_budget_bytes=1 << 33, **config)
        self.loop = Loop(cast(Model, self._model), self._config, self._take, kernels=kernels)
        cache = self.loop.cache
        cache.begin_step = self.meter.timed(PLAN, cache.begin_step)  # type: ignore[method-assign]

    @property
    def prompt_tokens_computed(self) -> int:
        """Prompt tokens that no cache had."""
        return self.loop.scheduler.counters.prompt_tokens_computed

    @property
    def kv_bytes(self) -> int:
        """Bytes of pages that are held by requests or kept for reuse, and of all tails."""
        cache = self.loop.cache
        pages = sum(group.allocator.num_held * group.page_bytes for group in cache.groups)
        return pages + self.tail_bytes

    @property
    def running_bytes(self) -> int:
        """Bytes of pages that running requests hold, and of all tails."""
        prefix = self.loop.scheduler.kv_manager.prefix
        groups = enumerate(self.loop.cache.groups)
        kept = sum(prefix.num_evictable(g) * group.page_bytes for g, group in groups)
        return self.kv_bytes - kept

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails, used or not: what steps in flight write."""
        return sum(part.nbytes for pool in self.loop.cache.paged for part in pool.tail_parts())

    @property
    def launched(self) -> Work:
        """All work that was started."""
        return self._model.forward.work

    def store_model(self) -> None:
        """Compute once more, then no more: everything but the model is measured."""
        self._model.forward.storing = self._model.logits.storing = True

    def submit(self, ask: Ask) -> None:
        """Queue a prompt."""
        request = Request(ask.name, ask.prompt_ids, ask.params)
        self.prompt_tokens += len(request.prompt_ids)
        self.loop.add(request, self.loop.limits.check(request))

    def step(self) -> list[TokenEvent]:
        """Launch a step, read the one before; return the tokens that it brought."""
        self._tokens = []
        launched_before = self.launched
        self.loop.turn()
        self.done = launched_before
        return self._tokens

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.error is not None:
                raise event.error
        self._tokens += events


# -- mlx-lm -----------------------------------------------------------------------------------


class PeerEngine:
    """mlx-lm with the defaults of its server, driven as that server drives it.

    Everything that has arrived is looked up in the prompt cache and inserted; caches are stored
    where a segment ends and where an answer ends. That server also spends half a second on a batch
    before it looks for arrivals, which is left out. As there, every request brings its own sampler.

    Args:
        model: from `load_peer_model`.
        max_batch: requests that decode at once.
    """

    tail_bytes = 0

    def __init__(self, model: Any, *, max_batch: int = 32) -> None:
        self.meter = Meter()
        self.prompt_tokens = self.prompt_tokens_computed = 0
        self._model = MeteredModel(model, self.meter)
        self._sampling = peer_module("mlx_lm.sample_utils")
        self._stored = peer_module("mlx_lm.models.cache").LRUPromptCache(10)
        self._generator = peer_module("mlx_lm.generate").BatchGenerator(
            self._model, completion_batch_size=max_batch
        )
        self._names: dict[int, str] = {}
        self._types: dict[int, list[str]] = {}  # segments to come, the next one last

    @property
    def kv_bytes(self) -> int:
        """Bytes of its batches and of its prompt cache, as mlx-lm counts them."""
        return int(self.running_bytes + self._stored.nbytes)

    @property
    def running_bytes(self) -> int:
        """Bytes of its batches alone."""
        return int(self._generator.prompt_cache_nbytes)

    @property
    def done(self) -> Work:
        """All work: a step returns when its prefill is done."""
        return self._model.forward.work

    def store_model(self) -> None:
        """Compute once more, then no more."""
        self._model.forward.storing = True

    def submit(self, ask: Ask) -> None:
        """Take what the prompt cache has, and insert the rest."""
        prompt, params = ask.prompt_ids, ask.params
        cache, rest = self._stored.fetch_nearest_cache(MODEL_KEY, prompt)
        num_cached = len(prompt) - len(rest)
        self.prompt_tokens += len(prompt)
        self.prompt_tokens_computed += len(rest)
        segments = _without(ask.segments, num_cached)
        sampler = self._sampling.make_sampler(
            temp=params.temperature,
            top_p=params.top_p if params.top_p < 1 else 0.0,
            min_p=params.min_p,
            top_k=params.top_k,
        )
        penalty = params.repetition_penalty
        processors = self._sampling.make_logits_processors(
            repetition_penalty=None if penalty == 1 else penalty
        )
        (uid,) = self._generator.insert_segments(
            [[list(ids) for _, ids in segments]],
            max_tokens=[params.max_tokens or 1 << 30],
            caches=[cache],
            all_tokens=[prompt[:num_cached]],
            samplers=[sampler],
            logits_processors=[processors],
        )
        self._names[uid] = ask.name
        self._types[uid] = [kind for kind, _ in segments][::-1]

    def step(self) -> list[TokenEvent]:
        """Take one turn of its server's loop."""
        prompts, generated = self._generator.next()
        ended = [
            r.uid
            for r in prompts
            if r.end_of_segment and not r.end_of_prompt and self._types[r.uid]
        ]
        for uid, (cache, ids) in self._generator.extract_cache(ended).items():
            kind = self._types[uid].pop()
            self._stored.insert_cache(MODEL_KEY, ids[:], cache, cache_type=kind)
        for r in generated:
            if r.finish_reason is not None:
                self._stored.insert_cache(MODEL_KEY, r.all_tokens[:], r.prompt_cache)
        return [
            TokenEvent(
                self._names[r.uid],
                r.token,
                None if r.finish_reason is None else FinishReason(r.finish_reason),
            )
            for r in generated
        ]


def _without(segments: list[Segment], count: int) -> list[Segment]:
    """The segments without their first `count` tokens; whole ones are left out."""
    left = []
    for kind, ids in segments:
        if count < len(ids):
            left.append((kind, ids[count:]))
        count = max(count - len(ids), 0)
    return left


# -- both -------------------------------------------------------------------------------------

Engine = OurEngine | PeerEngine


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint, loaded by both sides; mlx-lm's model is None where it is not measured."""

    ours: Model
    theirs: Any

    @classmethod
    def of(cls, folder: Path, *, peer: bool) -> "Loaded":
        """Load a folder; with mlx-lm too if `peer`."""
        return cls(load(folder), load_peer_model(folder) if peer else None)

    def engines(self, *, peer_batch: int = 32, **ours: Any) -> Iterator[Engine]:
        """New engines, made one by one: `ours` are arguments of OurEngine."""
        yield OurEngine(self.ours, **ours)
        if self.theirs is not None:
            yield PeerEngine(self.theirs, max_batch=peer_batch)


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
            answer = answers[token.request_id]
            answer.first_s = answer.first_s or now
            assert token.token_id is not None, "asks without grammars and end tokens"
            answer.token_ids.append(token.token_id)
            if token.finish_reason is not None:
                unfinished.remove(token.request_id)
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
        waiting -= {token.request_id for token in engine.step()}
