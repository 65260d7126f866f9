"""The answers to one or several inputs: token events of the engine in, steps and results out.

A caller may leave early: by an error, Ctrl-C, a cancelled task or a closed generator. Its requests
then end. One call in C ends them, so a signal handler cannot interrupt it halfway.
"""

import asyncio
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..core import FinishReason, Request, TokenEvent, TokenLogprobs
from ..errors import EngineClosedError
from ..outputs import (
    Delta,
    Part,
    PromptProgress,
    ReasoningPart,
    Result,
    Timing,
    Usage,
    joined_calls,
    merged,
    split,
)
from ..text import TextStream
from ..threads import take
from .attempts import Attempts
from .guard import Guard
from .inputs import EncodedPrompt
from .prompt_scores import PromptScores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.engine import Engine, Listener


@dataclass(slots=True)
class AnswerStep:
    """One answer grows by one event of the engine."""

    index: int  # of the answer: inputs in their order, n answers each
    delta: Delta
    logprobs: TokenLogprobs | None = None  # of the delta's token
    progress: PromptProgress | None = None  # where an input asked for reports; the delta is empty


class AnswerWatcher(Protocol):
    """Counts events for metrics and queues."""

    def record(self, index: int, event: TokenEvent) -> None:
        """An event of an answer has come."""

    def end(self, index: int, reason: str, result: Result | None) -> None:
        """An answer is complete, or has failed: then `reason` is "error"."""

    def close(self) -> None:
        """Stop reading these answers. May be called twice."""


class Answer:
    """One answer: turns the token events of a request into deltas and a Result.

    The text can end the answer before the engine does: by a stop string, or by a tool call if only
    one is allowed. The finish reason is then STOP. All other finish reasons come from the engine.

    Args:
        new_stream: makes the TextStream that turns the tokens into text.
        attempts: makes the request again if the complete answer breaks a schema; None: it is not
            checked.
        prompt_scores: takes the logits of the prompt; None: they are kept in `prompt_logits`.
        guard: of the caller's functions; None: there are none.

    Attributes:
        progress: how far the prompt was computed, where the request asked for reports.
        reasoning_tokens: tokens so far, up to the last one of the reasoning.
        ended_early: the text has ended the answer before the engine did, so the request must be
            aborted.
        prompt_logits: (n, vocab) float32 each, of the prompt's next n positions, if the request
            asks for them.
    """

    def __init__(
        self,
        request: Request,
        new_stream: Callable[[], TextStream],
        *,
        prompt: EncodedPrompt | None = None,
        attempts: Attempts | None = None,
        prompt_scores: PromptScores | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.request = request
        self.guard = guard
        self.prompt = EncodedPrompt(request.prompt_ids) if prompt is None else prompt
        self.prompt_scores = prompt_scores
        self.attempts = attempts
        self._new_stream = new_stream
        self._submitted_s = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self.prompt_logits: list[NDArray[np.float32]] = []
        self.ended_early = False
        self.progress: PromptProgress | None = None
        self.result: Result | None = None
        self.reasoning_tokens = 0
        self._stream = self._new_stream()
        self.token_ids: list[int] = []
        scored = self.request.params.logprobs is not None
        self._logprobs: list[TokenLogprobs] | None = [] if scored else None
        self._parts: list[Part] = []
        self._cached_tokens = 0
        self._first_token_s = 0.0

    def try_again(self) -> bool:
        """Make another request if the answer breaks a schema; False: the answer is valid."""
        assert self.attempts is not None
        assert self.result is not None
        request = self.attempts.after(self.request, self.result)
        if request is None:
            return False
        self.request = request
        self._begin()
        return True

    def watched(self, listener: "Listener") -> "Listener":
        for part in (self.guard, self.prompt_scores):
            listener = listener if part is None else part.watched(listener)
        return listener

    @property
    def num_attempts(self) -> int:
        return 1 if self.attempts is None else self.attempts.num

    @property
    def stop_match(self) -> str | None:
        return self._stream.stop_match

    def push(self, event: TokenEvent) -> Delta:
        """Add one event; the delta of the last one carries the Result."""
        if event.error is not None:
            raise event.error
        if event.prompt_logits is not None:
            self.prompt_logits.append(event.prompt_logits)
        new_ids: Sequence[int] = ()
        self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
        if event.token_id is not None:
            new_ids = (event.token_id,)
            self._first_token_s = self._first_token_s or event.made_s
            self.token_ids.append(event.token_id)
            if self._logprobs is not None and event.logprobs is not None:
                self._logprobs.append(event.logprobs)
        parts, reason = self._push_text(event)
        self._parts += parts
        if reason is not None:
            self.result = self._finish(reason, event.made_s)
        delta = Delta(parts=parts, token_ids=new_ids, result=self.result)
        if ReasoningPart in map(type, parts):
            self.reasoning_tokens = len(self.token_ids)
        return delta

    def _push_text(self, event: TokenEvent) -> tuple[tuple[Part, ...], FinishReason | None]:
        """The new text, and the reason why the answer has ended; None: it has not ended."""
        parts: tuple[Part, ...] = ()
        reason = event.finish_reason
        if event.token_id is not None and reason is not FinishReason.STOP:  # an end token has none
            parts = self._stream.push([event.token_id])
        if reason is not None:
            parts = merged([*parts, *self._stream.finish()])
        if self._stream.stopped and reason is not FinishReason.ABORT:
            self.ended_early = reason is None
            reason = FinishReason.STOP
        return parts, reason

    def _finish(self, reason: FinishReason, finished_s: float) -> Result:
        text, reasoning, calls = split(self._parts)
        return Result(
            text=text,
            reasoning=reasoning or None,
            tool_calls=joined_calls(calls),
            num_attempts=self.num_attempts,
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self._cached_tokens,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            timing=self._timing(finished_s),
            params=self.request.params,
        )

    def _timing(self, finished_s: float) -> Timing:
        """Where the time went. Times are when the engine made a token, not when it was read."""
        request, first_s = self.request, self._first_token_s or finished_s
        submitted_s = request.arrived_s or self._submitted_s
        started_s = request.started_s or first_s
        prefill_s, decode_s = first_s - started_s, finished_s - first_s
        return Timing(
            queued_s=started_s - submitted_s,
            prefill_s=prefill_s,
            time_to_first_token_s=first_s - submitted_s,
            decode_s=decode_s,
            total_s=finished_s - submitted_s,
            prompt_tokens_per_s=_rate(len(request.prompt_ids) - self._cached_tokens, prefill_s),
            tokens_per_s=_rate(len(self.token_ids) - 1, decode_s),
            drafted=request.num_drafted,
            accepted=request.num_accepted,
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


class Mailbox:
    """Passes events of other threads to the answers that one event loop reads.

    A wake-up of the loop costs a system call; events posted before the loop has run share one.

    Args:
        loop: not kept alive by the mailbox.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._posted: deque[tuple[Answers, TokenEvent]] = deque()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Mailbox":
        return _mailboxes.setdefault(loop, cls(loop))

    def post(self, target: "Answers", event: TokenEvent) -> None:
        """Let `target` receive an event on the loop; called on any thread.

        If the loop is closed, nobody can read the event, and the target's requests end.
        """
        loop = self._loop()
        with self._lock:
            first = not self._posted
            self._posted.append((target, event))
        try:
            if loop is None or loop.is_closed():
                raise RuntimeError
            if first:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed, perhaps just now
            self._posted.clear()
            target.abort()

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
        for target, event in posted:
            target.receive(event)


_mailboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]"
_mailboxes = weakref.WeakKeyDictionary()


class Answers:
    """Several answers that run together and are read together. `Session.start` makes them.

    They are read once: by `for` on a thread, by `async for` on an event loop, or by `results` and
    `aresults`. Iterating yields lists: the steps that have arrived together. Steps that arrived
    before an error are yielded before it is raised.

    Args:
        owner: the session. The reference keeps the model open as long as its answers are read.

    Attributes:
        abort: ends all of the requests; may be called on any thread.

    Raises (by every way to read them):
        InvalidRequestError, ContextLengthError, InsufficientMemoryError: a request can never run.
        RequestFailedError: a request failed. The others end, too.
        GrammarFailedError: no attempt at an answer passed its check.
        EngineClosedError: the engine was closed before all had ended.
    """

    def __init__(self, engine: "Engine", answers: Sequence[Answer], *, owner: object) -> None:
        self.answers = list(answers)
        self._engine = engine
        self._owner = owner
        self._unfinished: dict[str, int] = {}  # request id -> index
        self._held: dict[int, list[AnswerStep]] = {}  # of answers that are checked when complete
        ids: list[str] = []
        for index, answer in enumerate(answers):
            self._unfinished[answer.request.id] = index
            ids += (answer.request.id, *(answer.attempts.ids if answer.attempts else ()))
        self.abort: Callable[[], None] = engine.aborter(ids)
        self._listener: Listener | None = None
        self._begun = False
        self._watcher: AnswerWatcher | None = None
        self._inbox: list[TokenEvent] = []  # for the event loop that reads the answers
        self._error: Exception | None = None  # of an interruption
        self._news = asyncio.Event()  # something arrived, or it was silent for a while
        self._keep_alive_s: float | None = None
        self._heard_s = 0.0  # event-loop time of the last event
        self._timer: asyncio.TimerHandle | None = None

    # -- what they are --------------------------------------------------------------------------

    @property
    def num_attempts(self) -> int:
        """The most requests that one answer took; more than 1 if an answer broke its schema."""
        return max(answer.num_attempts for answer in self.answers)

    @property
    def usage(self) -> Usage:
        firsts = {id(answer.request.prompt_ids): answer for answer in reversed(self.answers)}
        done = [first.result for first in firsts.values() if first.result is not None]
        return Usage(
            prompt_tokens=sum(len(first.request.prompt_ids) for first in firsts.values()),
            cached_tokens=sum(result.cached_tokens for result in done),
            answer_tokens=sum(len(answer.token_ids) for answer in self.answers),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
        )

    # -- threads --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[AnswerStep]]:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        abort = self.abort
        try:
            self._submit(events.put)
            while self._unfinished:
                self._engine.require_process()
                arrived = [take(events)]
                while not events.empty():
                    arrived.append(events.get())
                steps, error = self._take_all(arrived)
                if steps:
                    yield steps
                if error is not None:
                    raise error
        except BaseException:  # the caller leaves: an error, Ctrl-C, a closed generator
            abort()
            raise

    def results(self, watch: Callable[[Result], None] | None = None) -> list[Result]:
        for steps in self:
            for step in steps:
                if watch is not None and step.delta.result is not None:
                    watch(step.delta.result)
        return self._results()

    # -- asyncio --------------------------------------------------------------------------------

    def begin(
        self, *, keep_alive_s: float | None = None, watcher: AnswerWatcher | None = None
    ) -> None:
        """Hand all requests to the engine, or none. Their events come to the running event loop.

        `async for` calls this if it was not called before.

        Args:
            keep_alive_s: seconds of silence after which an empty list of steps is yielded.
            watcher: gets each event before its step is yielded.
        """
        loop = asyncio.get_running_loop()
        self._keep_alive_s, self._watcher = keep_alive_s, watcher
        try:
            self._submit(partial(Mailbox.of(loop).post, self))
        except BaseException:  # some requests may have been submitted
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[list[AnswerStep]]:
        try:
            if not self._begun:
                self.begin()
            self._heard_s = asyncio.get_running_loop().time()
            if self._keep_alive_s is not None:
                self._watch_silence(self._keep_alive_s)
            while self._unfinished:
                steps, error = await self._arrived()
                if steps or error is None:
                    yield steps
                if error is not None:
                    raise error
        finally:
            self.close()

    async def aresults(self) -> list[Result]:
        """`results` for asyncio; a cancelled task ends the requests."""
        async for _ in self:
            pass
        return self._results()

    def interrupt(self, error: Exception) -> None:
        """Make the reader raise `error` next. A deadline calls this, on the event loop."""
        self._error = error
        self._news.set()

    def close(self) -> None:
        """End the requests that have not ended. May be called at any time, and twice."""
        if self._unfinished:
            self.abort()
        if self._watcher is not None:
            self._watcher.close()
        if self._timer is not None:
            self._timer.cancel()
        self._listener = None  # it refers to these answers, and they to the model

    # -- events ---------------------------------------------------------------------------------

    def _submit(self, listener: "Listener") -> None:
        self._listener, self._begun = listener, True
        for answer in self.answers:
            self._engine.submit(answer.request, answer.watched(listener))

    def receive(self, event: TokenEvent) -> None:
        self._inbox.append(event)
        self._news.set()

    async def _arrived(self) -> tuple[list[AnswerStep], Exception | None]:
        """Wait for events; return their steps up to the first error, and that error.

        No steps and no error mean that nothing came for a while.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._news.wait()
            self._news.clear()
            arrived, self._inbox = self._inbox, []
            if not arrived and self._error is None:
                return [], None
            self._heard_s = loop.time()
            steps, error = self._take_all(arrived)
            error = error or self._error
            if steps or error is not None or not self._unfinished:
                return steps, error

    def _watch_silence(self, keep_alive_s: float) -> None:
        """Check the silence by one timer, set again when it fires, and not by one timer a token."""
        loop = asyncio.get_running_loop()
        due_s = self._heard_s + keep_alive_s
        if loop.time() >= due_s:
            self._news.set()
            due_s = loop.time() + keep_alive_s
        self._timer = loop.call_at(due_s, self._watch_silence, keep_alive_s)

    def _take_all(self, events: Sequence[TokenEvent]) -> tuple[list[AnswerStep], Exception | None]:
        steps: list[AnswerStep] = []
        try:
            for event in events:
                steps += self._take(event)
        except Exception as error:  # raised once the steps before it are out
            return steps, error
        return steps, None

    def _take(self, event: TokenEvent) -> Sequence[AnswerStep]:
        """The steps of an event; empty if the answer had ended before.

        If an answer is checked when it is complete, its steps come all at once. So no caller sees
        an answer that is then tried again.
        """
        index = self._unfinished.get(event.request_id)
        if index is None:  # aborted after its stop string
            return ()
        if event.finish_reason is FinishReason.ABORT:  # not by this caller
            raise EngineClosedError("The model was closed while it answered.")
        watcher, answer = self._watcher, self.answers[index]
        if watcher is not None:
            watcher.record(index, event)
            if event.error is not None:
                watcher.end(index, "error", None)
        delta, progress = answer.push(event), None
        if event.prompt_tokens:
            seconds = event.made_s - answer.request.started_s
            total = len(answer.request.prompt_ids)
            progress = PromptProgress(event.prompt_tokens, event.cached_tokens, total, seconds)
            answer.progress = progress
        steps: Sequence[AnswerStep] = (AnswerStep(index, delta, event.logprobs, progress),)
        if answer.result is not None:
            del self._unfinished[event.request_id]
            if answer.ended_early:
                self._engine.abort(event.request_id)
        if answer.attempts is not None:
            steps = self._checked(index, steps)
        if watcher is not None and answer.result is not None:
            watcher.end(index, str(answer.result.finish_reason), answer.result)
        return steps

    def _checked(self, index: int, steps: Sequence[AnswerStep]) -> Sequence[AnswerStep]:
        """The steps of an answer once it has passed its check; until then they are held."""
        answer = self.answers[index]
        held = self._held.setdefault(index, [])
        held += steps
        if answer.result is None:
            return ()
        del self._held[index]
        if not answer.try_again():
            return held
        assert self._listener is not None
        self._unfinished[answer.request.id] = index
        self._engine.submit(answer.request, answer.watched(self._listener))
        return ()

    def _results(self) -> list[Result]:
        return [answer.result for answer in self.answers if answer.result is not None]
