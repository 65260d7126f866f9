"""/page/answers: answers to stored conversations, each generated whether or not a tab follows it.

A tab that begins an answer, one that is opened meanwhile, and one that lost its connection all read
the same stream. The server stores the answer as it grows, and at its end.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from ...errors import MlxinferError
from ...history import History, StoredMessage, owner_of
from ..apis.chat import ChatRequest, chat
from ..call import Call
from ..errors import HttpError
from ..http import DONE, Events, Plain, RequestBody, Route, data, decode
from ..keys import ApiKey

SAVE_S = 2.0  # between two saves of an answer that grows
DRAW_S = 0.03  # between two events: a display shows no more
SILENCE_S = 1.0  # after which an event says again what is waited for
MAX_ENDED = 32  # answers that can still be followed
MessageId = tuple[str, str]  # an owner and the id of a message
_FRAME = b"data: {"
log = logging.getLogger("mlxinfer.server")


class AnswerStart(msgspec.Struct, kw_only=True):
    """The message that the answer is stored as; `details`: what the page shows beside it."""

    id: str
    parent: str
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    content: str = ""  # that the answer goes on from
    reasoning: str = ""


class AnswerFields(RequestBody, kw_only=True):
    """An answer to a conversation; `request` is a body of /v1/chat/completions that streams."""

    conversation: str
    message: AnswerStart
    request: msgspec.Raw


class RunningAnswer:
    """An answer that grows. Lives on one event loop.

    Attributes:
        waiting: what the answer waits for; None: it speaks, or has ended.
        problem: why the answer is not stored; None: it is.
        load_progress: of its model: bytes that are loaded, and all; None: it is not being loaded.
        task: generates the answer; ends after it was stored.
        followers: streams that have begun and not ended.
    """

    def __init__(self, conversation: str, start: AnswerStart) -> None:
        self.conversation, self.id = conversation, start.id
        self.details = {**start.details, "grows": True}  # stays where the server ends before it
        self.waiting: Plain | None = {"for": "model"}
        self.load_progress: Callable[[], Plain | None] = lambda: None
        self.problem: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.followers = 0
        self._start = start
        self._content, self._reasoning = [start.content], [start.reasoning]  # in pieces
        self._created_s, self._began_s = time.time(), time.monotonic()
        self._marks: dict[str, float] = {}  # seconds until the first text, the answer, the last
        self._news = asyncio.Event()
        self._generated = self._ended = False

    @property
    def message(self) -> StoredMessage:
        return StoredMessage(
            id=self.id,
            parent=self._start.parent,
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            details=dict(self.details),
            created_s=self._created_s,
        )

    def take(self, frames: bytes) -> None:
        for frame in frames.split(b"\n\n"):
            if frame.startswith(_FRAME):
                self._take_chunk(msgspec.json.decode(frame[len(_FRAME) - 1 :]))
        self._tell()

    def end(self, **details: Any) -> None:
        self._generated, self.waiting = True, None
        del self.details["grows"]
        self.details.update(details)

    def close(self) -> None:
        self._ended = True
        self._tell()

    def queue(self) -> None:
        """The model is loaded: the answer waits for its turn."""
        self.waiting = {"for": "turn"}
        self._tell()

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield the answer so far, what follows, and [DONE]."""
        self.followers += 1
        content = thought = 0
        try:
            while True:
                news, ended = self._news, self._ended
                fresh, thoughts = self._content[content:], self._reasoning[thought:]
                content, thought = content + len(fresh), thought + len(thoughts)
                yield data(
                    {
                        "content": "".join(fresh),
                        "reasoning": "".join(thoughts),
                        "details": self.details,
                        "waiting": self._waited_for(),
                        "problem": self.problem,
                    }
                )
                if ended:
                    yield DONE
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(SILENCE_S):
                        await news.wait()
                await asyncio.sleep(DRAW_S)
        finally:
            self.followers -= 1

    def _waited_for(self) -> Plain | None:
        if self.waiting is None or self.waiting["for"] != "model":
            return self.waiting
        progress = self.load_progress()
        return {"for": "turn"} if progress is None else {**self.waiting, **progress}

    async def cancel(self) -> None:
        assert self.task is not None
        if not self._generated:
            self.task.cancel()
        await asyncio.wait({self.task})

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _take_chunk(self, chunk: Mapping[str, Any]) -> None:
        choice = chunk["choices"][0] if chunk["choices"] else {}
        if progress := chunk.get("prompt_progress"):
            self.waiting = {"for": "prompt", **progress}
        self._take_delta(choice.get("delta", {}))
        if choice.get("finish_reason"):
            self.details["finish"] = choice["finish_reason"]
        if usage := chunk.get("usage"):
            self.details["usage"] = {
                "prompt": usage["prompt_tokens"],
                "cached": usage["prompt_tokens_details"]["cached_tokens"],
                "answer": usage["completion_tokens"],
                "thought": usage["completion_tokens_details"]["reasoning_tokens"],
            }

    def _take_delta(self, delta: Mapping[str, Any]) -> None:
        content, thought = delta.get("content"), delta.get("reasoning_content")
        calls = delta.get("tool_calls") or ()
        if not (content or thought or calls):
            return
        self.waiting = None
        self._content += [content] if content else []
        self._reasoning += [thought] if thought else []
        for piece in calls:
            _add_call(self.details.setdefault("tool_calls", []), piece)
        self._note_times(speaks=not thought)

    def _note_times(self, *, speaks: bool) -> None:
        marks, now_s = self._marks, time.monotonic() - self._began_s
        first_s, marks["last"] = marks.setdefault("first", now_s), now_s
        if speaks:
            marks.setdefault("spoken", now_s)
        if len(self._reasoning) > 1:
            self.details["thought_ms"] = round(1e3 * (marks.get("spoken", now_s) - first_s))
        self.details["times"] = {"first_ms": round(1e3 * first_s), "last_ms": round(1e3 * now_s)}


def _add_call(calls: list[Plain], piece: Mapping[str, Any]) -> None:
    if piece["index"] == len(calls):
        calls.append({"id": piece.get("id"), "name": "", "arguments": ""})
    call, function = calls[piece["index"]], piece["function"]
    call["name"] += function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""


class Owners:
    """Owners by API key, noted in the history when a key is first seen."""

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._named: set[ApiKey] = set()  # keys whose owners the file knows

    async def of(self, call: Call) -> str:
        key = call.key
        if key is None:
            return ""
        if self._history is not None and key not in self._named:
            await call.in_worker(self._history.name_owner, owner_of(key.digest), key.owner)
            self._named.add(key)
        return key.owner


class AnswerRoutes:
    """The handlers of /page/answers.

    Args:
        history: where answers are stored; None: nowhere, and an answer without a follower ends.
    """

    def __init__(self, owners: Owners, history: History | None) -> None:
        self._owners, self._history = owners, history
        self._running: dict[MessageId, RunningAnswer] = {}
        self._ended: dict[
            MessageId, RunningAnswer
        ] = {}  # the last ones, whose end a tab may not know

    async def begin(self, call: Call, body: AnswerFields) -> Events:
        """Begin an answer, and stream it; a second request for it follows it."""
        request = decode(bytes(body.request), ChatRequest, "request")
        request.stream, request.n = True, 1
        owner = await self._owners.of(call)
        place = (owner, body.message.id)
        if place not in self._running:
            running = self._running[place] = RunningAnswer(body.conversation, body.message)
            copy = call.again(request.order)
            running.task = asyncio.create_task(self._run(owner, running, copy, request))
        return Events(self._follow(self._running[place]))

    async def follow(self, call: Call) -> Events:
        """Stream an answer that runs or has just ended: its text so far, then what follows."""
        return Events(self._follow(await self._found(call, {**self._ended, **self._running})))

    async def stop(self, call: Call) -> Plain:
        """End an answer where it is; what it has said is stored."""
        running = await self._found(call, self._running)
        await running.cancel()
        return {"id": running.id, "stopped": True}

    def running(self, owner: str) -> dict[str, str]:
        return {
            running.conversation: id
            for (whose, id), running in self._running.items()
            if whose == owner
        }

    async def end_all(self, owner: str, conversation: str) -> None:
        """End the answers to a conversation that is deleted, and forget those that have ended."""
        for (whose, _), running in list(self._running.items()):
            if (whose, running.conversation) == (owner, conversation):
                await running.cancel()
        for place, ended in list(self._ended.items()):
            if (place[0], ended.conversation) == (owner, conversation):
                del self._ended[place]

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", "/page/answers", self.begin),
            Route("GET", "/page/answers/{id}", self.follow),
            Route("DELETE", "/page/answers/{id}", self.stop),
        )

    async def _found(self, call: Call, answers: Mapping[MessageId, RunningAnswer]) -> RunningAnswer:
        id = call.path_params["id"]
        running = answers.get((await self._owners.of(call), id))
        if running is None:
            raise HttpError("not_found", f"No answer {id[:64]!r} is being generated.")
        return running

    async def _follow(self, running: RunningAnswer) -> AsyncIterator[bytes]:
        try:
            async for frame in running.follow():
                yield frame
        finally:
            if self._history is None and not running.followers and running.task is not None:
                running.task.cancel()

    async def _run(
        self, owner: str, running: RunningAnswer, call: Call, request: ChatRequest
    ) -> None:
        try:
            async with call:
                try:
                    await self._generate(owner, running, call, request)
                except asyncio.CancelledError:  # by RunningAnswer.cancel
                    running.end(finish="stopped")
                except Exception as error:  # the fault boundary of an answer
                    running.end(error=str(call.failure(error)))
                else:
                    running.end()
                await self._save(owner, running, call)
        finally:
            self._ended[owner, running.id] = self._running.pop((owner, running.id))
            while len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            running.close()
        log.info("answer of the page", extra=call.log)

    async def _generate(
        self, owner: str, running: RunningAnswer, call: Call, request: ChatRequest
    ) -> None:
        await self._save(owner, running, call)
        slot = call.service.models.find(request.model)
        running.load_progress = lambda: slot.load_progress
        reply = await chat(call, request)
        assert isinstance(reply, Events)
        running.queue()
        saved_s = time.monotonic()
        async with contextlib.aclosing(reply.frames) as chunks:  # type: ignore[type-var]
            async for frames in chunks:
                running.take(frames)
                if time.monotonic() - saved_s > SAVE_S:
                    await self._save(owner, running, call)
                    saved_s = time.monotonic()

    async def _save(self, owner: str, running: RunningAnswer, call: Call) -> None:
        if self._history is None:
            return
        save = self._history.save_message
        try:
            await call.in_worker(save, owner, running.conversation, running.message)
            running.problem = None
        except MlxinferError as error:
            running.problem = str(error)
