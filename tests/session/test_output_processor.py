"""Token events to deltas and a Result: what ends an answer, and which part decides it."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxinfer import hub
from mlxinfer.core import FinishReason, Request, SamplingParams, TokenEvent
from mlxinfer.errors import RequestFailedError
from mlxinfer.session.engine_client import EngineClient, RequestGroup
from mlxinfer.session.output_processor import OutputProcessor, PromptScores
from mlxinfer.text import TextStream, Tokenizer

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(hub.resolve("demo"))


class FakeEngine:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []

    def submit(self, request: Request, listener: Any) -> None:
        self.submitted.append(request.id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def aborter(self, request_ids: list[str]) -> Any:
        return lambda: self.aborted.extend(request_ids)


def group_of(
    tokenizer: Tokenizer, *params: SamplingParams
) -> tuple[FakeEngine, RequestGroup, list[OutputProcessor]]:
    outputs = [
        OutputProcessor(
            Request(str(i), [5], each),
            partial(TextStream, tokenizer, stop=each.stop, min_tokens=each.min_tokens),
        )
        for i, each in enumerate(params)
    ]
    engine = FakeEngine()
    client = EngineClient(engine)  # type: ignore[arg-type]  # as far as it is used
    return engine, client.group(outputs), outputs


@pytest.mark.parametrize("seed", range(200))
def test_the_first_end_of_a_request_is_its_end(tokenizer: Tokenizer, seed: int) -> None:
    """A finish reason that was set stays; an answer is aborted if and only if its text ended it."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    stop = chance.choice([(), ("four",), ("ten",), ("e", "five"), ("nowhere",)])
    engine, group, (output,) = group_of(tokenizer, SamplingParams(stop=stop))
    reason = chance.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
    length = chance.randint(1, len(ids))
    events = [TokenEvent("0", token_id) for token_id in ids[:length]]
    if chance.random() < 0.5 and reason is not FinishReason.ABORT:
        events[-1] = events[-1]._replace(finish_reason=reason)
    else:
        events.append(TokenEvent.without_token("0", reason))
    late = [TokenEvent("0", 9), TokenEvent.without_token("0", FinishReason.ABORT)]
    steps = [step for event in [*events, *late] for step in group.push(event)]
    assert group.finished
    result = steps[-1].delta.result
    assert result is output.result is not None
    assert all(step.delta.result is None for step in steps[:-1])
    assert "".join(step.delta.text for step in steps) == result.text
    told = tokenizer.decode([e.token_id for e in events if e.token_id is not None])
    if output.stop_match is None:
        assert (result.finish_reason, engine.aborted) == (reason, [])
        assert len(steps) == len(events)
    else:
        assert told.startswith(result.text + output.stop_match)
        assert result.finish_reason is FinishReason.STOP
        ended_early = steps[-1].event.finish_reason is None
        assert engine.aborted == ["0"] * ended_early


def test_events_of_other_requests_go_on_after_one_has_ended(tokenizer: Tokenizer) -> None:
    engine, group, outputs = group_of(tokenizer, SamplingParams(stop="two"), SamplingParams())
    for token_id in tokenizer.encode(TEXT, add_special_tokens=False):
        for request_id in ("0", "1"):
            group.push(TokenEvent(request_id, token_id))
    assert engine.aborted == ["0"]
    assert not group.finished
    group.push(TokenEvent.without_token("1", FinishReason.LENGTH))
    assert group.finished
    assert [o.result.text for o in outputs if o.result] == ["one ", TEXT]


def test_a_failure_is_raised_where_its_event_is_pushed(tokenizer: Tokenizer) -> None:
    _, group, _ = group_of(tokenizer, SamplingParams())
    failure = RequestFailedError("a step failed")
    with pytest.raises(RequestFailedError, match="a step failed"):
        group.push(TokenEvent.without_token("0", FinishReason.ERROR, error=failure))


def test_a_group_that_is_left_aborts_all_that_it_submitted(tokenizer: Tokenizer) -> None:
    engine, group, _ = group_of(tokenizer, SamplingParams(), SamplingParams())
    group.submit(lambda event: None)
    assert engine.submitted == ["0", "1"]
    group.close()
    assert engine.aborted == ["0", "1"]


def test_prompt_logits_are_scored_or_kept_never_both(tokenizer: Tokenizer) -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]], np.float32))
    scored = OutputProcessor(
        Request("0", [0, 2, 1], SamplingParams()),
        partial(TextStream, tokenizer),
        prompt_scores=PromptScores([0, 2, 1], 2),
    )
    passed_on: list[TokenEvent] = []
    listeners: list[Any] = []
    engine: Any = SimpleNamespace(
        submit=lambda request, listener: listeners.append(listener),
        aborter=lambda ids: lambda: None,
    )
    RequestGroup(engine, [scored]).submit(passed_on.append)
    (listener,) = listeners
    for row in logits:
        listener(TokenEvent.without_token("0", prompt_logits=row[None]))
    listener(TokenEvent("0", 5))
    assert [event.token_id for event in passed_on] == [5]
    assert scored.prompt_scores is not None
    first, *scores = scored.prompt_scores.scores
    assert first is None
    assert [s.logprob for s in scores if s] == pytest.approx(np.log([0.7, 0.3]), abs=1e-6)
    assert [s.top[0][0] for s in scores if s] == [2, 0]
    kept = OutputProcessor(
        Request("1", [0, 2, 1], SamplingParams()), partial(TextStream, tokenizer)
    )
    kept.push(TokenEvent.without_token("1", prompt_logits=logits))
    assert kept.prompt_logits == [logits]
