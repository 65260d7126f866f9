"""The answers of one call while they are generated. Knows the engine's events; no API, no HTTP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ...core import FinishReason, TokenEvent
from ...errors import EngineClosedError, OverloadedError
from ...outputs import Result
from ...session.engine_client import Step
from ...session.output_processor import OutputProcessor
from ..registry.served import ServedModel
from ..watch.request_metrics import Meter, RequestMetrics
from .service import Admission


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ends the generation with an error."""

    error: Exception


class Silence:
    """No event came for a while."""


Message = TokenEvent | Interrupt | Silence
SILENCE = Silence()


class Generation:
    """Runs answers together: `start`, then `steps` or `results`, and `close` in any case.

    Args:
        model: runs them.
        answers: built for it, in the order of the choices.
        admission: where they queue.
        metrics: of the model, for the metrics.
        keep_alive_s: seconds of silence after which `steps` yields an empty list.
    """

    def __init__(
        self,
        model: ServedModel,
        answers: Sequence[OutputProcessor],
        admission: Admission,
        metrics: RequestMetrics,
        *,
        keep_alive_s: float,
    ) -> None:
        self.model = model
        self.answers = list(answers)
        self.num_tokens = [0] * len(self.answers)  # of each answer so far
        self.reasoning_tokens = [0] * len(self.answers)  # of each answer, up to its last thought
        self._client = model.client
        self._group = self._client.group(self.answers)
        self._admission = admission
        self._keep_alive_s = keep_alive_s
        self._meter = Meter(metrics, [answer.request for answer in self.answers])
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._waiting: set[int] = set()  # answers without a token
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0  # event-loop time of the last step

    @property
    def num_waiting(self) -> int:
        """Answers without a token: queued, or with a prompt that is still read."""
        return len(self._waiting)

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
        self._waiting.update(range(len(self.answers)))
        try:
            self._group.submit(self._client.posting_to(self._inbox))
        except BaseException:  # whatever it is, what was counted is counted back
            self._meter.refuse()
            self.close()
            raise

    def interrupt(self, error: Exception) -> None:
        """Let `steps` raise `error` instead of what comes next."""
        self._inbox.put_nowait(Interrupt(error))

    async def steps(self) -> AsyncIterator[list[Step]]:
        """Yield the steps that have arrived, until every answer is complete; [] after a silence.

        Steps that arrived before an error are yielded before it is raised.

        Raises:
            RequestFailedError: a step went wrong.
            the error of an interrupt.
        """
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        self._watch_silence()
        while not self._group.finished:
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
        """End the requests that have not ended, and leave the queue. May be called twice."""
        if not self._group.finished:
            self._group.close()
        self._meter.close()
        for index in list(self._waiting):
            self._leave_queue(index)
        if self._timer is not None:
            self._timer.cancel()

    def _take_all(self, messages: Sequence[Message]) -> tuple[list[Step], Exception | None]:
        """The steps of the messages up to the first error, and that error."""
        steps: list[Step] = []
        try:
            for message in messages:
                steps += self._take(message)
        except Exception as error:  # raised once the steps before it are out
            return steps, error
        return steps, None

    def _take(self, message: Message) -> list[Step]:
        if isinstance(message, Interrupt):
            raise message.error
        if isinstance(message, Silence):
            return []
        index = self._group.index_of(message)
        if index is None:  # aborted after its stop string
            return []
        if message.finish_reason is FinishReason.ABORT:  # not by this call
            raise EngineClosedError("The model was unloaded while it answered; ask again.")
        if message.prompt_tokens:
            return self._group.push(message)
        self._leave_queue(index)
        self._meter.record(index, message)
        if message.error is not None:
            self._meter.end(index, "error")
        return [self._counted(step) for step in self._group.push(message)]

    def _counted(self, step: Step) -> Step:
        """The same step, after its tokens and its end have been counted."""
        index, delta = step.index, step.delta
        self.num_tokens[index] += len(delta.token_ids)
        if delta.reasoning:
            self.reasoning_tokens[index] = self.num_tokens[index]
        if delta.result is not None:
            self._meter.end(index, str(delta.result.finish_reason), delta.result)
        return step

    def _leave_queue(self, index: int) -> None:
        if index in self._waiting:
            self._waiting.discard(index)
            self._admission.leave(len(self.answers[index].request.prompt_ids))

    def _watch_silence(self) -> None:
        """One timer that looks again when the silence could be long enough, not one a token."""
        loop = asyncio.get_running_loop()
        due_s = self._heard_s + self._keep_alive_s
        if loop.time() >= due_s:
            self._inbox.put_nowait(SILENCE)
            due_s = loop.time() + self._keep_alive_s
        self._timer = loop.call_at(due_s, self._watch_silence)
