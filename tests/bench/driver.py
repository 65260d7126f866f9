"""What a benchmark asks of an engine, and mlxinfer's loop driven so. Knows no threads and no text.

Both engines are driven turn by turn from one thread, so that what is measured is the engine and not
the queue in front of it. `Meter` counts CPU time of that thread, which counts neither waiting nor
other threads and processes, so it is steady on a busy machine. On the CPU backend the arithmetic
runs on MLX's own threads and is not counted.
"""

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, cast
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer.config import EngineConfig
from mlxinfer.core import Grammar, Request, SamplingParams, TokenEvent
from mlxinfer.engine import loop, runner
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.engine.loop import Loop
from mlxinfer.layers.step import Step
from mlxinfer.models.decoder import Model

Evaluation = Callable[..., Any]
FORWARD = "forward"  # building the graph of the model: calls, attention, logits
PLAN = "plan"  # what the KV cache works out before the forward pass
DISPATCH = "dispatch"  # mx.eval and mx.async_eval: handing the graph to the backend


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
    """Both libraries look up mx.eval and mx.async_eval when they call them: so here is where to
    listen. MLX is as before afterwards.
    """
    originals = mx.eval, mx.async_eval
    mx.eval, mx.async_eval = around(mx.eval), around(mx.async_eval)
    try:
        yield
    finally:
        mx.eval, mx.async_eval = originals


@contextmanager
def engine_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Steps are timed by this clock."""
    time = SimpleNamespace(monotonic=clock)
    with patch.object(loop, "time", time), patch.object(runner, "time", time):
        yield


@dataclass(frozen=True, slots=True)
class Work:
    """Forward passes, and the tokens that they computed, padding included."""

    passes: int = 0
    rows: int = 0

    def since(self, earlier: "Work") -> "Work":
        """What came on top."""
        return Work(self.passes - earlier.passes, self.rows - earlier.rows)


class Driver(Protocol):
    """An engine under measurement."""

    meter: Meter

    @property
    def done(self) -> Work:
        """All work of which `step` has returned the tokens."""
        ...

    def store_model(self) -> None:
        """From now on the model returns what it returned last: all else is what is measured."""
        ...

    def add(self, name: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[str]:
        """One turn; the names of the requests that got a token in it."""
        ...


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


class OurDriver:
    """mlxinfer's loop.

    Args:
        model: evaluated and ready.
        max_batch: requests that run at once.
        prefill_chunk: prompt tokens a step at most.
        prefill_slice_s: seconds of a step's prompts beside answers; None: `prefill_chunk` fixed.
        num_pages: of KV cache; None: as many as 4 GB hold.
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
        launch_ahead: bool = True,
        kernels: Chooser = choose_none,
    ) -> None:
        self.meter = Meter()
        self.done = Work()
        self._launch_ahead = launch_ahead
        self._model = MeteredModel(model, self.meter)
        self._named: list[str] = []
        config = EngineConfig(
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            prefill_slice_s=prefill_slice_s,
            max_context=model.config.max_context,
            kv_budget_bytes=1 << 32,
            num_pages=num_pages,
            launch_ahead=launch_ahead,
        )
        self.loop = Loop(cast(Model, self._model), config, self._take, kernels=kernels)
        cache = self.loop.cache
        cache.begin_step = self.meter.timed(PLAN, cache.begin_step)  # type: ignore[method-assign]

    @property
    def launched(self) -> Work:
        """All work that was started."""
        return self._model.work

    def store_model(self) -> None:
        """Compute once more, then no more."""
        self._model.storing = True

    def add(
        self,
        name: str,
        prompt_ids: list[int],
        params: SamplingParams,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a request."""
        request = Request(name, prompt_ids, params, grammar=grammar)
        self.loop.add(request, self.loop.check(request))

    def step(self) -> list[str]:
        """Launch a step, read the one before."""
        self._named = []
        launched_before = self._model.work
        self.loop.turn()
        self.done = launched_before if self._launch_ahead else self._model.work
        return self._named

    def _take(self, events: list[TokenEvent]) -> None:
        named = [event.request_id for event in events if event.token_id is not None]
        if len(named) < len(events):
            for error in [event.error for event in events if event.error is not None]:
                raise error
        self._named += named
