"""The answers of one call while they are generated. Knows the engine's events; no API, no HTTP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ...core import FinishReason, TokenEvent
from ...errors import EngineClosedError, OverloadedError
from ...session.output_processor import OutputProcessor
from ...session.results import Delta, Result
from ..registry.prompt_scores import PromptScores
from ..registry.served import ServedModel
from ..watch.request_metrics import Meter, RequestMetrics
from .admission import Admission


@dataclass(frozen=True, slots=True)
class Step:
    """What one token added to one answer."""

    index: int  # of the answer within the call
    delta: Delta
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ends the generation with an error."""

    error: Exception


class Silence:
    """Nothing came for a while."""


Message = TokenEvent | Interrupt | Silence
SILENCE = Silence()


class Generation:
    """Runs answers together: `start`, then `steps` or `results`, and `close` in any case.

    Args:
        model: that answers.
        answers: made by it, in the order of the choices.
        admission: where they queue.
        metrics: of the model, for the metrics.
        keep_alive_s: seconds of silence after which `steps` yields an empty list.
        scores: for each answer where to score its prompt; None: no prompt is scored.
    """

    def __init__(
        self,
        model: ServedModel,
        answers: Sequence[OutputProcessor],
        admission: Admission,
        metrics: RequestMetrics,
        *,
        keep_alive_s: float,
        scores: Sequence[PromptScores] | None = None,
    ) -> None:
        self.model = model
        self.answers = list(answers)
        self.num_tokens = [0] * len(self.answers)  # of each answer so far
        self.reasoning_tokens = [0] * len(self.answers)  # of each answer, up to its last thought
        self._scores = scores
        self._admission = admission
        self._keep_alive_s = keep_alive_s
        self._meter = Meter(metrics, [answer.request for answer in self.answers])
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._index_of = {a.request.id: i for i, a in enumerate(self.answers)}
        self._unfinished: set[str] = set()
        self._waiting: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0  # event-loop time of the last step

    def start(self) -> None:
        """Hand all requests to the engine, or none.

        Raises:
            InvalidRequestError, ContextLengthError, InsufficientMemoryError: one can never run.
            OverloadedError: too many wait.
            EngineClosedError: the model is gone.
        """
        num_tokens = sum(len(a.request.prompt_ids) for a in self.answers)
        try:
            self._admission.enter(len(self.answers), num_tokens)
        except OverloadedError:
            self._meter.refuse(full=True)
            raise
        self._meter.begin()
        self._waiting.update(self._index_of)
        try:
            for index, answer in enumerate(self.answers):
                scores = self._scores[index] if self._scores else None
                self.model.submit(answer.request, self._inbox, scores)
                self._unfinished.add(answer.request.id)
        except BaseException:
            self._meter.refuse()
            self.close()
            raise

    def interrupt(self, error: Exception) -> None:
        """Let `steps` raise `error` instead of what comes next."""
        self._inbox.put_nowait(Interrupt(error))

    async def steps(self) -> AsyncIterator[list[Step]]:
        """Yield what has come, until every answer is complete; an empty list is silence.

        What came before an error is yielded before it is raised.

        Raises:
            RequestFailedError: a step went wrong.
            the error of an interrupt.
        """
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        self._watch_silence()
        while self._unfinished:
            messages = [await self._inbox.get()]
            while not self._inbox.empty():
                messages.append(self._inbox.get_nowait())
            steps, error = self._take_all(messages)
            self._heard_s = loop.time()
            if steps or (SILENCE in messages and error is None):
                yield steps
            if error is not None:
                raise error

    async def results(self) -> list[Result]:
        """Wait for all answers; raises as `steps`."""
        async for _ in self.steps():
            pass
        results = [answer.result for answer in self.answers]
        return [result for result in results if result is not None]

    def close(self) -> None:
        """End what has not ended, and leave the queue. May be called twice."""
        for request_id in self._unfinished:
            self.model.engine.abort(request_id)
        self._unfinished.clear()
        self._meter.close()
        for request_id in list(self._waiting):
            self._leave_queue(request_id)
        if self._timer is not None:
            self._timer.cancel()

    def _take_all(self, messages: Sequence[Message]) -> tuple[list[Step], Exception | None]:
        """What messages become, up to the first that is an error; and that error."""
        steps: list[Step] = []
        try:
            for message in messages:
                steps += self._take(message)
        except Exception as error:
            return steps, error
        return steps, None

    def _take(self, message: Message) -> list[Step]:
        if isinstance(message, Interrupt):
            raise message.error
        if isinstance(message, Silence):
            return []
        if message.request_id not in self._unfinished:  # aborted after its stop string
            return []
        if message.finish_reason is FinishReason.ABORT:  # we did not ask for it
            raise EngineClosedError("The model was unloaded while it answered; ask again.")
        self._leave_queue(message.request_id)
        index = self._index_of[message.request_id]
        answer = self.answers[index]
        self._meter.record(index, message)
        if message.error is not None:
            self._meter.end(index, "error")
        delta = answer.push(message)
        self.num_tokens[index] += len(delta.token_ids)
        if delta.reasoning:
            self.reasoning_tokens[index] = self.num_tokens[index]
        if answer.result is not None:
            self._unfinished.discard(message.request_id)
            self._meter.end(index, str(answer.result.finish_reason), answer.result)
            if answer.stopped:
                self.model.engine.abort(message.request_id)
        return [Step(index, delta, message)]

    def _leave_queue(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            answer = self.answers[self._index_of[request_id]]
            self._admission.leave(len(answer.request.prompt_ids))

    def _watch_silence(self) -> None:
        """One timer that looks again when the silence could be long enough, not one a token."""
        loop = asyncio.get_running_loop()
        due_s = self._heard_s + self._keep_alive_s
        if loop.time() >= due_s:
            self._inbox.put_nowait(SILENCE)
            due_s = loop.time() + self._keep_alive_s
        self._timer = loop.call_at(due_s, self._watch_silence)
