"""The engine's thread: submit, abort, call and close from any other."""

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import PAGE, alone, config, prompt, tiny_model

from mlxinfer.core import FinishReason, Request, SamplingParams, TokenEvent
from mlxinfer.engine.engine import Engine, Listener, generation
from mlxinfer.engine.loop import Loop
from mlxinfer.errors import EngineClosedError, InvalidRequestError


@pytest.fixture
def engine():
    made = Engine(
        generation(lambda: (tiny_model("qwen3-v4", quantized=True), config(num_pages=400), None))
    )
    yield made
    made.close()


def collect(events: "queue.SimpleQueue[TokenEvent]", count: int) -> dict[str, list[TokenEvent]]:
    """All events of `count` requests."""
    seen: dict[str, list[TokenEvent]] = {}
    while count:
        event = events.get(timeout=60)
        seen.setdefault(event.request_id, []).append(event)
        count -= event.finish_reason is not None
    return seen


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def test_requests_from_many_threads(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def submit(i: int) -> None:
        engine.submit(Request(str(i), prompt(10 + i), params), events.put)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(submit, range(12)))
    seen = collect(events, 12)
    model = tiny_model("qwen3-v4", quantized=True)
    for i in range(12):
        assert tokens(seen[str(i)]) == alone(model, prompt(10 + i), params).token_ids


def test_abort_ends_a_request_and_frees_its_pages(engine: Engine) -> None:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine.submit(Request("a", prompt(30), SamplingParams(max_tokens=3000)), events.put)
    events.get(timeout=60)
    engine.abort("a")
    engine.abort("never heard of")
    assert collect(events, 1)["a"][-1].finish_reason is FinishReason.ABORT
    assert engine.stats()["groups"][0]["pages_held"] == 0
    assert engine.stats()["running"] == 0


def test_bad_requests_raise_where_they_are_made(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.submit(Request("a", [], SamplingParams()), lambda event: None)
    assert engine.stats()["requests"] == 0


def test_close_ends_everything_and_twice_is_fine(engine: Engine) -> None:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    for name in "ab":
        engine.submit(Request(name, prompt(PAGE), SamplingParams(max_tokens=3000)), events.put)
    engine.close()
    assert {e[-1].finish_reason for e in collect(events, 2).values()} == {FinishReason.ABORT}
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit(Request("c", [5], SamplingParams()), events.put)
    with pytest.raises(EngineClosedError):
        engine.stats()


def test_an_error_of_load_is_raised_by_the_constructor() -> None:
    def load():  # type: ignore[no-untyped-def]
        raise InvalidRequestError("no such thing")

    with pytest.raises(InvalidRequestError, match="no such thing"):
        Engine(generation(load))


def test_ctrl_c_while_a_model_loads_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would run on, and take the process down as the interpreter ends."""
    closing = threading.Event()
    closed_in_time: list[bool] = []
    close = Engine.close
    engines: list[Engine] = []

    def noted(engine: Engine) -> None:
        engines.append(engine)
        closing.set()
        close(engine)

    def load():  # type: ignore[no-untyped-def]
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # wakes a waiting lock
        closed_in_time.append(closing.wait(20))
        return tiny_model("qwen3-v4", quantized=True), config(num_pages=40)

    monkeypatch.setattr(Engine, "close", noted)
    with pytest.raises(KeyboardInterrupt):
        Engine(generation(load))
    (engine,) = engines
    assert closed_in_time == [True]
    assert engine.closed
    assert not engine._thread.is_alive()


def corrupt(loop: Loop) -> None:
    loop.scheduler.queues.preempt(loop.scheduler.queues.running[0])
    loop.scheduler.queues.waiting.clear()


def test_a_scheduler_fault_does_not_kill_the_engine(engine: Engine) -> None:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine.submit(Request("a", prompt(30), SamplingParams(max_tokens=3000)), events.put)
    events.get(timeout=60)

    engine.call(corrupt)
    assert collect(events, 1)["a"][-1].finish_reason is FinishReason.ERROR
    engine.submit(Request("b", prompt(30), SamplingParams(max_tokens=3)), events.put)
    assert len(tokens(collect(events, 1)["b"])) == 3


def add_together(engine: Engine, requests: list[Request], listener: Listener) -> None:
    """So that they share their steps."""

    def add(loop: Loop) -> None:
        for request in requests:
            engine._add(request, loop.limits.check(request), listener)

    engine.call(add)


class BreakingGrammar(FakeGrammar):
    """Cannot take its fourth token."""

    def accept(self, token_id: int) -> None:
        if len(self.taken) == 3:
            raise RuntimeError("the grammar broke")
        super().accept(token_id)


def test_requests_that_end_in_the_step_of_a_fault_get_their_last_event(engine: Engine) -> None:
    """A grammar breaks over a token of the same step in which others get their last one."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    broken = Request("broken", prompt(9), SamplingParams(max_tokens=20))
    broken.grammar = BreakingGrammar()
    constrained = Request("constrained", prompt(9, 1), params)
    constrained.grammar = FakeGrammar(1)
    requests = [Request("free", prompt(9, 2), params), broken, constrained]
    add_together(engine, requests, events.put)
    seen = collect(events, 3)
    free, failed = seen["free"], seen["broken"][-1]
    assert (len(tokens(free)), free[-1].finish_reason) == (4, FinishReason.LENGTH)
    assert failed.finish_reason is FinishReason.ERROR
    assert "the grammar broke" in str(failed.error)
    assert len(tokens(seen["constrained"])) == 4


def test_a_listeners_error_ends_its_request(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_always(event: TokenEvent) -> None:
        raise RuntimeError("a listener broke")

    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    unheard = [Request(name, prompt(9), params) for name in ("deaf", "dumb")]
    add_together(engine, unheard, raise_always)
    add_together(engine, [Request("heard", prompt(9, 1), params)], events.put)
    assert len(tokens(collect(events, 1)["heard"])) == 20
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert caplog.text.count("the listener of request deaf failed") == 1
    assert engine.call(lambda _: not engine._listeners)


def test_a_request_that_ended_just_before_a_fault_gets_a_last_event(engine: Engine) -> None:
    """The scheduler knows it no longer, and its last token was lost."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    runner, calls = engine._loop.runner, itertools.count(1)
    commit = runner.commit

    def break_once(*args: Any) -> None:
        if next(calls) == 4:
            raise MemoryError("no room for a history")
        commit(*args)

    runner.commit = break_once  # type: ignore[method-assign]
    ends, goes_on = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 20))
    requests = [Request("ends", prompt(9), ends), Request("goes on", prompt(9, 1), goes_on)]
    add_together(engine, requests, events.put)
    seen = collect(events, 2)
    assert all(seen[r.id][-1].finish_reason is FinishReason.ERROR for r in requests)
    assert "no room for a history" in str(seen["ends"][-1].error)
    engine.submit(Request("after", prompt(9), ends), events.put)
    assert len(tokens(collect(events, 1)["after"])) == 4


def test_an_engine_that_cannot_start_afresh_ends_with_an_error_for_each_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits for ever: running, submitted while it ends, or submitted later."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def leave_at_the_end(event: TokenEvent) -> None:
        if event.error is not None:
            engine.abort("a")  # a caller that leaves while the engine ends
        events.put(event)

    engine.submit(Request("a", prompt(30), SamplingParams(max_tokens=3000)), leave_at_the_end)
    events.get(timeout=60)

    def no_memory(self: Loop) -> None:
        raise MemoryError("no room for a new cache")

    monkeypatch.setattr(Loop, "assemble", no_memory)

    engine.call(corrupt)
    last = collect(events, 1)["a"][-1]
    assert last.finish_reason is FinishReason.ERROR
    engine._thread.join(60)
    assert engine.closed
    with pytest.raises(EngineClosedError):
        engine.submit(Request("b", prompt(30), SamplingParams(max_tokens=3)), events.put)
    with pytest.raises(EngineClosedError):
        engine.stats()


@pytest.mark.parametrize("times", [0, 1, 3, 8, 19])
def test_a_request_submitted_while_the_engine_closes_is_answered(times: int) -> None:
    engine = Engine(
        generation(lambda: (tiny_model("qwen3-v4", quantized=True), config(num_pages=40), None))
    )
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    accepted = 0
    closing = threading.Timer(0.001 * times, engine.close)
    closing.start()
    with contextlib.suppress(EngineClosedError):
        while True:
            params = SamplingParams(max_tokens=2)
            engine.submit(Request(str(accepted), prompt(5), params), events.put)
            accepted += 1
    closing.join()
    assert len(collect(events, accepted)) == accepted


def test_a_thread_that_cannot_start_fails_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        Engine(generation(lambda: (tiny_model("qwen3-v4"), config(), None)))


def test_an_engine_raises_in_a_forked_process(engine: Engine) -> None:
    child = os.fork()
    if not child:  # in the child no thread but this one lives on: nothing of pytest may run
        try:
            engine.submit(Request("a", [1], SamplingParams()), lambda _: None)
        except EngineClosedError as error:
            os._exit("forked" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_process_cannot_build_an_engine(engine: Engine) -> None:
    """MLX would wait for threads that are not there, also where the engine was closed before."""
    for close in (False, True):
        if close:
            engine.close()
        child = os.fork()
        if not child:
            try:
                Engine(generation(lambda: (tiny_model("qwen3-v4"), config(), None)))
            except EngineClosedError as error:
                engine.close()  # which does not wait for a thread that is not here
                os._exit("spawn" not in str(error))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_call_returns_and_raises(engine: Engine) -> None:
    assert engine.call(lambda _: threading.current_thread().name) == "mlxinfer-engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda _: 1 / 0)


def test_an_idle_engine_uses_no_cpu(engine: Engine) -> None:
    before = engine.call(lambda _: time.thread_time())
    time.sleep(0.3)
    assert engine.call(lambda _: time.thread_time()) - before < 0.1
