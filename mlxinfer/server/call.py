"""One request while it is answered: its body, model and answers, and their release at its end."""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import parse_qs

from ..errors import InvalidRequestError, OverloadedError
from ..session.answers import Answers, AnswerStep
from ..session.inputs import Input
from .errors import HttpError, ShuttingDownError
from .http import (
    KEEP_ALIVE,
    Body,
    ClientGoneError,
    Events,
    Headers,
    Receive,
    Route,
    Scope,
    Send,
    decode,
    encode,
    logged,
    public,
    read_body,
    send_body,
    send_events,
)
from .pictures import PictureFetches, refuse_urls
from .protocol import ABORT
from .served import ServedModel
from .service import BODY_BYTES, LARGE_BODY, Meter, ServerState

if TYPE_CHECKING:
    from ..session.pooling_session import Pooled, Vectors

P = ParamSpec("P")
T = TypeVar("T")
Read = Callable[[], Iterable[Input]]  # translates a body; called in a worker thread

TIMEOUT_HEADER = b"x-request-timeout"  # seconds after which the answer is of no use to the client
ATTEMPTS = b"x-mlxinfer-attempts"  # requests that an answer took which is checked when complete
log = logging.getLogger("mlxinfer.server")


class Call:
    """The first argument of a handler. Used as a context manager around the whole reply.

    Args:
        service: answers it.
        scope: of the connection.

    Attributes:
        id: of the answer; never the same twice.
        request_id: in the log and in the x-request-id header; clients may choose it.
        key: name of the API key; None: the server has none.
        created_s: seconds since 1970.
        log: what the access log shall say of it; never text of prompts or answers.
        headers: of the reply.
        answers: that it has begun, each group with its meter.
    """

    def __init__(self, service: ServerState, scope: Scope) -> None:
        self.service = service
        self.scope = scope
        self.id = secrets.token_hex(12)
        self.request_id: str = scope["mlxinfer.id"]
        self.log: dict[str, Any] = scope["mlxinfer.log"]
        self.log["answer_id"] = self.id
        self.key: str | None = self.log.get("key")
        self.path_params: dict[str, str] = scope["path_params"]
        self.created_s = int(time.time())
        self.headers: Headers = []
        self.answers: list[tuple[Answers, Meter]] = []
        self._kept = AsyncExitStack()
        self._error: Exception | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._working: asyncio.Task[Any] | None = None  # waits for a model, or for vectors

    @property
    def query(self) -> dict[str, str]:
        """The query of the path; of a repeated field the last value."""
        text = self.scope["query_string"].decode("ascii", "replace")
        return {name: values[-1] for name, values in parse_qs(text).items()}

    def header(self, name: bytes) -> bytes | None:
        """A header of the request, by its name in lower case."""
        return dict(self.scope["headers"]).get(name)

    def require_admin(self) -> None:
        """Raise HttpError unless the request's key administers the server."""
        self.service.config.keys.require_admin(self.key)

    def refuse_while_draining(self) -> None:
        """Raise ShuttingDownError where the server is about to end."""
        if self.service.draining:
            raise ShuttingDownError("The server is shutting down.", retry_after_s=10.0)

    # -- models and answers ---------------------------------------------------------------------

    async def model(self, name: str | None) -> ServedModel:
        """The model that the request names, kept until the call ends.

        Raises:
            ModelNotFoundError: there is none of this name.
            OverloadedError: it is not loaded, and cannot be now.
            ModelLoadError: it could not be loaded, or its adapter could not.
            ShuttingDownError: nothing new is begun.
            the error of an interrupt.
        """
        self.refuse_while_draining()
        slot, adapter = self.service.models.resolve(name)
        use = self._kept.enter_async_context(self.service.models.use(slot))
        model = await self._interruptible(use)
        if adapter is not None:
            slot.check_adapter(adapter)
            model = model.with_adapter(adapter)
        self.log["model"] = model.name
        return model

    async def start(self, model: ServedModel, read: Read) -> Answers:
        """Begin the answers to the inputs that `read` gives; they end with the call at the latest.

        Args:
            model: generates them.
            read: translates the body; called in a worker thread.

        Raises:
            whatever `read` and Session.start raise.
            OverloadedError: too many wait.
            the error of an interrupt.
        """
        answers = await self.in_worker(self._prepared, model, await self._fetched(model, read))
        self._raise_interrupt()
        meter = Meter(self._metrics_of(model), self.service.admission, answers.answers)
        self.answers.append((answers, meter))
        answers.begin(keep_alive_s=self.service.config.keep_alive_s, watcher=meter)
        meter.accept()
        return answers

    async def count_tokens(self, model: ServedModel, read: Callable[[], Input]) -> int:
        """Tokens of the prompt of an input, which `read` gives in a worker thread."""
        return len(await self.encode(model, read))

    async def encode(self, model: ServedModel, read: Callable[[], Input]) -> list[int]:
        """The token ids of an input, which `read` gives in a worker thread."""

        def alone() -> list[Input]:
            return [read()]

        def ids(read: Read) -> list[int]:
            (given,) = [self._checked(model, each) for each in read()]
            return model.generator.encode(given, bounded=False).ids

        return await self.in_worker(ids, await self._fetched(model, alone))

    async def _fetched(self, model: ServedModel, read: Read) -> Read:
        """`read` with pictures in place of URLs, where the server fetches them for this model."""
        if not self.service.config.fetch_images or "vision" not in model.session.capabilities:
            return read
        given = await self.in_worker(lambda: list(read()))
        urls: list[str] = []

        def note(url: str, _: str) -> bytes:
            urls.append(url)
            return b""

        for each in given:
            each.fetched(note)
        if urls:
            fetch = PictureFetches().fetch
            work = self.service.fetchers.run(lambda: [each.fetched(fetch) for each in given])
            given = await self._interruptible(work)
        return lambda: given

    def _checked(self, model: ServedModel, given: Input) -> Input:
        """The input; raises PictureError for URLs. A model of text refuses pictures itself."""
        return given.fetched(refuse_urls) if "vision" in model.session.capabilities else given

    def _prepared(self, model: ServedModel, read: Read) -> Answers:
        inputs = [
            replace(
                self._checked(model, each),
                owner=self.key,
                adapter=model.adapter,
                cache_salt=self._namespace(each.cache_salt),
            )
            for each in read()
        ]
        return model.generator.start(*inputs)

    async def pool(self, model: ServedModel, read: "Callable[[], Pooled]") -> "tuple[int, Vectors]":
        """The tokens that a model read, and its vectors or scores.

        Args:
            model: gives them.
            read: encodes the input; called in a worker thread.

        Raises:
            InvalidRequestError, ContextLengthError: the input is wrong; or the model generates.
            OverloadedError: too many wait.
            RequestFailedError: a pass went wrong.
            the error of an interrupt.
        """
        self._raise_interrupt()
        pooled = await self.in_worker(read)
        self._raise_interrupt()
        num_tokens = pooled.num_tokens
        metrics, admission = self._metrics_of(model), self.service.admission
        try:
            admission.enter(1, num_tokens)
        except OverloadedError:
            metrics.num_rejected += 1
            raise
        self._kept.callback(admission.leave, num_tokens)
        self.log.update(prompt_tokens=num_tokens, rows=len(pooled.request.rows))
        with metrics.pooling(num_tokens):
            return num_tokens, await self._interruptible(pooled.aresult())

    async def in_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, off the event loop."""
        return await self.service.workers_for(self.scope).run(function, *args, **kwargs)

    def note_usage(self, answers: Answers, *reasons: str) -> None:
        """Say in the log how many tokens were read and answered, and why the answers ended."""
        usage = answers.usage
        self.log.update(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            answer_tokens=usage.answer_tokens,
            finish_reason=",".join(sorted(set(reasons))),
        )

    async def frames(
        self,
        answers: Answers,
        write: Callable[[AnswerStep], Iterable[bytes]],
        keep_alive: bytes = KEEP_ALIVE,
    ) -> AsyncIterator[bytes]:
        """The frames of a stream as the answers' steps arrive; `keep_alive` after a silence."""
        self.log["stream"] = True
        async for steps in answers:
            frames = [frame for step in steps for frame in write(step)]
            if frames or not steps:
                yield b"".join(frames) or keep_alive

    def _metrics_of(self, model: ServedModel) -> Any:
        return self.service.request_metrics[model.base]

    def _namespace(self, salt: str | None) -> str | None:
        """The namespace of the prefix cache: no key finds the prompts of another key.

        Otherwise the time to a first token would tell one client what others have asked.
        """
        config = self.service.config
        if self.key is None or len(config.keys.digests) < 2 or config.share_prefixes:
            return salt
        return f"key {self.key}" if salt is None else f"key {self.key} {salt}"

    # -- its end --------------------------------------------------------------------------------

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something that an interrupt ends with its error."""
        self._working = working = asyncio.ensure_future(work)
        try:
            return await working
        except asyncio.CancelledError:
            self._raise_interrupt()
            raise

    def _raise_interrupt(self) -> None:
        if self._error is not None:
            raise self._error from None

    def interrupt(self, error: Exception) -> None:
        """End the call with `error`, in whatever state it is."""
        self._error = self._error or error
        for answers, _ in self.answers:
            answers.interrupt(error)
        if self._working is not None:
            self._working.cancel()

    @property
    def num_attempts(self) -> int:
        """Requests that the slowest answer took; more than 1 where one broke its schema."""
        return max([1, *(answers.num_attempts for answers, _ in self.answers)])

    def state(self) -> dict[str, Any] | None:
        """The call for the dashboard, without text of it; None: nothing is generated yet."""
        if not self.answers:
            return None
        each = [answer for answers, _ in self.answers for answer in answers.answers]
        limits = [answer.request.params.max_tokens for answer in each]
        queued = sum(meter.num_queued for _, meter in self.answers)
        return {
            "id": self.id,
            "path": self.scope["path"],
            "key": self.key,
            "model": self.log["model"],
            "answers": len(each),
            "waiting": queued == len(each),
            "prompt_tokens": len(each[0].request.prompt_ids),
            "answer_tokens": sum(answer.num_tokens for answer in each),
            "max_tokens": None if None in limits else sum(limit or 0 for limit in limits),
            "age_s": time.monotonic() - min(answer.request.arrived_s for answer in each),
        }

    async def __aenter__(self) -> "Call":
        limit_s = deadline_s(self.header(TIMEOUT_HEADER), self.service.config.deadline_s)
        self.service.calls.add(self)
        if limit_s is not None:
            error = HttpError(
                "deadline_exceeded", f"The request took longer than {limit_s:g} seconds."
            )
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(limit_s, self.interrupt, error)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for answers, meter in self.answers:
            answers.close()
            meter.close()
        if self.num_attempts > 1:
            self.log["attempts"] = self.num_attempts
        await self._kept.aclose()
        self.service.calls.discard(self)


def deadline_s(given: bytes | None, configured: float | None) -> float | None:
    """Seconds that a request may take: the client's own limit or the server's, the shorter one.

    Raises:
        InvalidRequestError: the header is no positive number.
    """
    if given is None:
        return configured
    try:
        wanted = float(given)
    except ValueError:
        wanted = 0.0
    if not 0 < wanted < math.inf:
        name = TIMEOUT_HEADER.decode()
        raise InvalidRequestError(f"{name} is a positive number of seconds.", param=name)
    return wanted if configured is None else min(wanted, configured)


# -- from a route to its reply ------------------------------------------------------------------


async def answer_call(
    service: ServerState, route: Route, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer one request by its route. Errors before the reply has begun are the caller's."""
    body: list[Any] = []
    if route.body is not None:
        body = [await _read(service, route.body, scope, receive)]
    async with Call(service, scope) as call:
        await unless_gone(_reply(call, route.handler(call, *body), send), receive)


async def _read(service: ServerState, kind: type, scope: Scope, receive: Receive) -> Any:
    config = service.config
    raw = await read_body(
        scope, receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    scope[BODY_BYTES] = len(raw)
    if len(raw) > LARGE_BODY:
        return await service.workers_for(scope).run(decode, raw, kind)
    return decode(raw, kind)


async def _reply(call: Call, handled: Awaitable[Any], send: Send) -> None:
    reply = await handled
    if isinstance(reply, Events):
        reply.headers += call.headers
        limit_s, abort = call.service.config.send_timeout_s, call.scope["state"][ABORT]
        last = partial(_last_event, call)
        await send_events(send, reply, last, limit_s=limit_s, abort=abort)
        return
    body = reply if isinstance(reply, Body) else Body(encode(reply))
    if call.num_attempts > 1:
        call.headers.append((ATTEMPTS, str(call.num_attempts).encode()))
    await send_body(send, replace(body, headers=[*body.headers, *call.headers]))


def _last_event(call: Call, error: Exception) -> bytes:
    """The frame that ends a stream which fails."""
    call.log.update(logged(error))
    shown = public(error)
    if shown is not error:
        log.error("stream failed", exc_info=error, extra={"request_id": call.request_id})
    event: bytes = call.scope["mlxinfer.form"].event(shown)
    return event


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; cancel it when the client hangs up.

    Raises:
        ClientGoneError: it did.
        whatever `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        await working
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
