"""The answers of one call, from the engine's events, however many of them come at once."""

import asyncio
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import LiveServer

from mlxinfer.core import FinishReason, SamplingParams, TokenEvent
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.loop import failed_event
from mlxinfer.errors import RequestFailedError
from mlxinfer.server.call import Call
from mlxinfer.server.http import OPENAI
from mlxinfer.session.answers import Answer, Answers
from mlxinfer.session.inputs import TextInput

PROMPT = [5, 6, 7]
NOTHING: Any = None


class Listening:
    """An engine that gives the events of a test."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.aborted: list[str] = []
        self.engine: Any = SimpleNamespace(
            submit=lambda *_: None,
            abort=self.aborted.append,
            aborter=lambda _: lambda: None,
        )

    def answers(self, *params: SamplingParams) -> list[Answer]:
        session: Any = self.server.model.session
        inputs = [TextInput(prompt=PROMPT, params=each) for each in params]
        return list(session.start(*inputs).answers)

    def says(self, answer: Answer, text: str) -> list[TokenEvent]:
        ids = self.server.model.tokenizer.encode(text, add_special_tokens=False)
        return [TokenEvent(answer.request.id, token_id) for token_id in ids]

    def hear(self, answers: list[Answer], events: Seq[TokenEvent]) -> list[str]:
        """The text of each answer when all events were there at once."""
        return asyncio.run(self._hear(answers, events))

    async def _hear(self, answers: list[Answer], events: Seq[TokenEvent]) -> list[str]:
        service = self.server.service
        running = Answers(self.engine, answers, owner=None)
        call = Call(service, {"headers": []}, NOTHING, OPENAI)
        call._metrics = service.request_metrics[self.server.model.name]
        texts = [""] * len(answers)
        try:
            call.begin(running)
            for event in events:
                running.receive(event)
            async for steps in running:
                for step in steps:
                    texts[step.index] += step.delta.text
        except RequestFailedError as error:
            texts.append(str(error))
        finally:
            running.close()
        return texts


@pytest.fixture
def listening(server: LiveServer) -> Listening:
    return Listening(server)


def test_steps_before_a_failure_are_yielded_before_it_is_raised(listening: Listening) -> None:
    (answer,) = answers = listening.answers(SamplingParams())
    failure = failed_event(Sequence(answer.request, 9, PROMPT, 3), ValueError("the GPU is gone"))
    text, error = listening.hear(answers, [*listening.says(answer, "hello"), failure])
    assert text == "hello"
    assert "the GPU is gone" in error


def test_events_after_a_stop_string_do_not_end_other_answers(listening: Listening) -> None:
    stops, goes_on = answers = listening.answers(SamplingParams(stop=("ll",)), SamplingParams())
    events = [
        *listening.says(stops, "hello"),
        *listening.says(stops, "late"),
        TokenEvent.without_token(stops.request.id, FinishReason.ABORT),
        *listening.says(goes_on, "hello"),
        TokenEvent.without_token(goes_on.request.id, FinishReason.LENGTH),
    ]
    assert listening.hear(answers, events) == ["he", "hello"]
    assert listening.aborted == [stops.request.id]
