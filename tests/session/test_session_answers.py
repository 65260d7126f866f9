"""Token events to steps and results: what ends an answer, who reads it, and who leaves it."""

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from mlxinfer import hub
from mlxinfer.core import FinishReason, Request, SamplingParams, TokenEvent
from mlxinfer.errors import EngineClosedError, InvalidRequestError, RequestFailedError
from mlxinfer.outputs import Result, Timing
from mlxinfer.session.answers import Answer, Answers, AnswerStep, Mailbox
from mlxinfer.session.prompt_scores import PromptScores
from mlxinfer.text import TextStream, Tokenizer
from tests.watching import note_calls

TEXT = "one two three four five six seven eight nine ten"
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(hub.resolve("demo"))


class FakeEngine:
    """Delivers the events of a test when the last request has been submitted."""

    def __init__(self, events: Sequence[TokenEvent] = (), num_requests: int = 1) -> None:
        self.events, self.num_requests = events, num_requests
        self.listeners: dict[str, Callable[[TokenEvent], None]] = {}
        self.aborted: list[str] = []

    def submit(self, request: Request, listener: Callable[[TokenEvent], None]) -> None:
        if request.adapter is not None:
            raise InvalidRequestError("There is no adapter.")
        self.listeners[request.id] = listener
        if len(self.listeners) == self.num_requests:
            for event in self.events:
                self.listeners[event.request_id](event)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def aborter(self, request_ids: list[str]) -> Any:
        return lambda: self.aborted.extend(request_ids)

    def require_process(self) -> None:
        pass


def answers_of(
    tokenizer: Tokenizer, engine: FakeEngine, *params: SamplingParams, prompts: Any = None
) -> Answers:
    answers = [
        Answer(
            Request(str(i), PROMPT if prompts is None else prompts[i], param),
            partial(TextStream, tokenizer, stop=param.stop, min_tokens=param.min_tokens),
        )
        for i, param in enumerate(params)
    ]
    engine.num_requests = len(answers)
    return Answers(engine, answers, owner=None)  # type: ignore[arg-type]  # as far as it is used


def read_on_a_thread(answers: Answers) -> tuple[list[AnswerStep], Exception | None]:
    steps: list[AnswerStep] = []
    try:
        for some in answers:
            steps += some
    except Exception as error:
        return steps, error
    return steps, None


def read_on_a_loop(answers: Answers) -> tuple[list[AnswerStep], Exception | None]:
    async def collect() -> None:
        async for some in answers:
            steps.extend(some)

    steps: list[AnswerStep] = []
    try:
        asyncio.run(collect())
    except Exception as error:
        return steps, error
    return steps, None


both = pytest.mark.parametrize("read", [read_on_a_thread, read_on_a_loop])


def says(tokenizer: Tokenizer, text: str, request_id: str = "0") -> list[TokenEvent]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [TokenEvent(request_id, token_id) for token_id in ids]


def timing_of(tokenizer: Tokenizer, made_s: Sequence[float], cached_tokens: int) -> Timing:
    """The times of an answer: submitted at 10 s, started at 10.5 s, its tokens made then."""
    request = Request("0", PROMPT, SamplingParams())
    answer = Answer(request, partial(TextStream, tokenizer))
    request.arrived_s, request.started_s = 10.0, 10.5
    for at_s in made_s:
        answer.push(TokenEvent("0", 9, made_s=at_s, cached_tokens=cached_tokens))
    end = TokenEvent("0", None, FinishReason.LENGTH, cached_tokens=cached_tokens)
    answer.push(end._replace(made_s=max(made_s, default=11.5)))
    return answer.result.timing


def test_times_are_those_of_the_engine(tokenizer: Tokenizer) -> None:
    assert timing_of(tokenizer, np.linspace(11.5, 13.5, 41).tolist(), 1) == Timing(
        queued_s=0.5,
        prefill_s=1.0,
        time_to_first_token_s=1.5,
        decode_s=2.0,
        total_s=3.5,
        prompt_tokens_per_s=2.0,
        tokens_per_s=20.0,
    )


@both
@pytest.mark.parametrize("seed", range(20))
def test_the_first_end_of_a_request_is_its_end(tokenizer: Tokenizer, read: Any, seed: int) -> None:
    """A finish reason that was set stays; an answer is aborted if and only if its text ended it."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    stop = chance.choice([(), ("four",), ("ten",), ("e", "five"), ("nowhere",)])
    reason = chance.choice([FinishReason.STOP, FinishReason.LENGTH])
    events = [TokenEvent("0", token_id) for token_id in ids[: chance.randint(1, len(ids))]]
    if chance.random() < 0.5:
        events[-1] = events[-1]._replace(finish_reason=reason)
    else:
        events.append(TokenEvent.without_token("0", reason))
    late = [TokenEvent("0", 9), TokenEvent.without_token("0", FinishReason.ABORT)]
    engine = FakeEngine([*events, *late])
    answers = answers_of(tokenizer, engine, SamplingParams(stop=stop))
    steps, error = read(answers)
    (answer,) = answers.answers
    assert error is None
    result = steps[-1].delta.result
    assert result is answer.result is not None
    assert all(step.delta.result is None for step in steps[:-1])
    assert "".join(step.delta.text for step in steps) == result.text
    told = tokenizer.decode([e.token_id for e in events if e.token_id is not None])
    if answer.stop_match is None:
        assert (result.finish_reason, engine.aborted) == (reason, [])
        assert len(steps) == len(events)
    else:
        assert told.startswith(result.text + answer.stop_match)
        assert result.finish_reason is FinishReason.STOP
        ended_early = events[len(steps) - 1].finish_reason is None
        assert engine.aborted == ["0"] * ended_early


@both
def test_events_after_a_stop_string_end_no_other_answer(tokenizer: Tokenizer, read: Any) -> None:
    events = [
        *says(tokenizer, "hello"),
        *says(tokenizer, "late"),
        TokenEvent.without_token("0", FinishReason.ABORT),
        *says(tokenizer, "hello", "1"),
        TokenEvent.without_token("1", FinishReason.LENGTH),
    ]
    engine = FakeEngine(events)
    answers = answers_of(tokenizer, engine, SamplingParams(stop="ll"), SamplingParams())
    assert read(answers)[1] is None
    assert [a.result.text for a in answers.answers if a.result] == ["he", "hello"]
    assert engine.aborted == ["0"]


@both
@pytest.mark.parametrize("end", [RequestFailedError("the GPU is gone"), None])
def test_steps_before_a_failure_are_yielded(
    tokenizer: Tokenizer, read: Any, end: Exception | None
) -> None:
    """A request that somebody else aborted has failed too: the engine was closed."""
    reason = FinishReason.ABORT if end is None else FinishReason.ERROR
    last = TokenEvent.without_token("0", reason, error=end)
    engine = FakeEngine([*says(tokenizer, "hello"), last])
    steps, error = read(answers_of(tokenizer, engine, SamplingParams()))
    assert "".join(step.delta.text for step in steps) == "hello"
    assert isinstance(error, EngineClosedError if end is None else RequestFailedError)


def test_a_loop_that_is_left_aborts_all_requests(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(says(tokenizer, "hello"))
    for _ in answers_of(tokenizer, engine, SamplingParams(), SamplingParams()):
        break
    assert engine.aborted == ["0", "1"]


async def test_a_cancelled_task_aborts_all_requests(tokenizer: Tokenizer) -> None:
    """So a deadline is `asyncio.timeout` around the loop."""
    engine = FakeEngine(says(tokenizer, "hello"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await answers_of(tokenizer, engine, SamplingParams()).aresults()
    assert engine.aborted == ["0"]


async def test_silence_is_an_empty_list_and_an_interrupt_an_error(tokenizer: Tokenizer) -> None:
    events = says(tokenizer, "hello")
    engine, result, moments = FakeEngine(events), list[int](), list[float]()
    answers = answers_of(tokenizer, engine, SamplingParams())
    answers.begin(keep_alive_s=0.1)
    with pytest.raises(ValueError, match="too late"):  # noqa: PT012  # it is the loop that raises
        async for steps in answers:
            result.append(len(steps))
            moments.append(time.monotonic())
            if len(result) == 4:
                answers.interrupt(ValueError("too late"))
    answers.close()
    assert result == [len(events), 0, 0, 0]
    assert moments[-1] - moments[0] > 2 * 0.1, (
        "three silences; the reader may see the first one late"
    )
    assert engine.aborted[:1] == ["0"]


async def test_all_requests_begin_or_none(tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    answers = answers_of(tokenizer, engine, SamplingParams(), SamplingParams())
    answers.answers[1].request.adapter = "nobody's"
    with pytest.raises(InvalidRequestError, match="no adapter"):
        answers.begin()
    assert engine.aborted == ["0", "1"]


class Watcher:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def record(self, index: int, event: TokenEvent) -> None:
        self.told.append((index, event.token_id is not None))

    def end(self, index: int, reason: str, result: Result | None) -> None:
        self.told.append((index, reason))

    def close(self) -> None:
        self.told.append(("close",))


async def test_a_watcher_is_told_each_event_and_end(tokenizer: Tokenizer) -> None:
    events = [
        TokenEvent("0", 300, FinishReason.LENGTH),
        TokenEvent.without_token("1", FinishReason.ERROR, error=RequestFailedError("no")),
    ]
    watcher = Watcher()
    answers = answers_of(tokenizer, FakeEngine(events), SamplingParams(), SamplingParams())
    answers.begin(watcher=watcher)
    with pytest.raises(RequestFailedError):
        await answers.aresults()
    assert watcher.told == [(0, True), (0, "length"), (1, False), (1, "error"), ("close",)]


def test_a_prompt_with_several_answers_is_counted_once(tokenizer: Tokenizer) -> None:
    events = [
        event
        for request_id in "012"
        for event in (
            *says(tokenizer, "hello", request_id),
            TokenEvent.without_token(request_id, FinishReason.LENGTH),
        )
    ]
    events[0] = events[0]._replace(cached_tokens=2)
    params, other = [SamplingParams()] * 3, [8, 9]
    answers = answers_of(tokenizer, FakeEngine(events), *params, prompts=[PROMPT, PROMPT, other])
    answers.results()
    usage, count = answers.usage, len(says(tokenizer, "hello"))
    assert (usage.prompt_tokens, usage.cached_tokens) == (5, 2)
    assert (usage.answer_tokens, usage.reasoning_tokens) == (3 * count, 0)


def test_prompt_logits_are_scored_or_kept_never_both(tokenizer: Tokenizer) -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]], np.float32))
    events = [
        *(TokenEvent.without_token("0", prompt_logits=row[None]) for row in logits),
        TokenEvent("0", 300, FinishReason.LENGTH),
    ]
    kept = answers_of(tokenizer, FakeEngine(events), SamplingParams(), prompts=[[0, 2, 1]])
    kept.results()
    np.testing.assert_array_equal(np.concatenate(kept.answers[0].prompt_logits), logits)
    scored = answers_of(tokenizer, FakeEngine(events), SamplingParams(), prompts=[[0, 2, 1]])
    (answer,) = scored.answers
    answer.prompt_scores = PromptScores([0, 2, 1], 2)
    steps, _ = read_on_a_thread(scored)
    assert len(steps) == 1
    assert not answer.prompt_logits
    first, *scores = answer.prompt_scores.scores
    assert first is None
    assert [s.logprob for s in scores if s] == pytest.approx(np.log([0.7, 0.3]), abs=1e-6)
    assert [s.top[0][0] for s in scores if s] == [2, 0]


# -- events from the engine's thread to event loops -----------------------------------------------


class Target:
    """Stands where answers do."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.num_aborts = 0

    def receive(self, event: Any) -> None:
        self.received.append(event)

    def abort(self) -> None:
        self.num_aborts += 1


async def test_events_arrive_in_order_and_share_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wake_ups = note_calls(monkeypatch, loop, "call_soon_threadsafe", lambda *work: work)
    mailbox: Any = Mailbox.of(loop)
    assert mailbox is Mailbox.of(loop)
    targets = [Target() for _ in range(3)]
    posting = threading.Thread(target=lambda: [mailbox.post(targets[i % 3], i) for i in range(999)])
    posting.start()
    posting.join()  # before the loop runs
    await asyncio.sleep(0.01)
    assert len(wake_ups) == 1
    assert [target.received for target in targets] == [list(range(i, 999, 3)) for i in range(3)]


def test_a_mailbox_holds_no_loop_and_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Any = Mailbox(loop)
    loop.close()
    target = Target()
    mailbox.post(target, 1)
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    for _ in range(10):
        mailbox.post(target, 1)
    assert target.num_aborts == 11
    assert not target.received
    assert not mailbox._posted, "never to be read, and ever more"
