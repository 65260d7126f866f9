"""One method and path as an ASGI app: body in, handler, reply out; a hang-up ends it all."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ..http.body import ClientGoneError, decode, read_body
from ..http.protocol import ABORT
from ..http.replies import (
    NO_STORE,
    OPENAI,
    Body,
    ErrorStyle,
    Events,
    Reply,
    logged,
    public,
    send_body,
)
from ..http.sse import StallWatch
from .call import Call
from .service import BODY_BYTES, LARGE_BODY, Service

Handler = Callable[[Call, Any], Awaitable[Reply]]
ATTEMPTS = b"x-mlxinfer-attempts"  # requests that an answer took which is checked when complete
log = logging.getLogger("mlxinfer.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method and path of an API file.

    Attributes:
        method, path: "POST", "/v1/chat/completions"; `{name}` or `{name:path}` in the path is a
            parameter, found in `Call.path_params`.
        handler: gets the Call and the decoded body (None where `body` is).
        summary: one line for the documentation.
        body: msgspec Struct of the request.
        answer: msgspec Struct of the JSON answer.
        style: how its errors look.
        needs_key: False: answered without a key; for paths without private data.
        operation: its name in the documentation; "": that of the handler.
        if_header: of two endpoints with one path, this one answers requests with that header.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: type | None = None
    answer: type | None = None
    style: ErrorStyle = OPENAI
    needs_key: bool = True
    operation: str = ""
    if_header: bytes | None = None


@dataclass(slots=True, eq=False)
class Served:
    """An endpoint of one running server: the ASGI app."""

    endpoint: Endpoint
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors before the reply has begun are the guard's to answer."""
        body = None
        if self.endpoint.body is not None:
            body = await self._body(scope, receive)
        async with Call(self.service, scope) as call:
            await unless_gone(self._answer(call, body, send), receive)

    async def _body(self, scope: Scope, receive: Receive) -> Any:
        assert self.endpoint.body is not None
        config = self.service.config
        raw = await read_body(
            scope, receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
        )
        scope[BODY_BYTES] = len(raw)
        if len(raw) > LARGE_BODY:
            return await self.service.workers_for(scope).run(decode, raw, self.endpoint.body)
        return decode(raw, self.endpoint.body)

    async def _answer(self, call: Call, body: Any, send: Send) -> None:
        reply = await self.endpoint.handler(call, body)
        if isinstance(reply, Body):
            if call.num_attempts > 1:
                reply.headers.append((ATTEMPTS, str(call.num_attempts).encode()))
            await send_body(send, reply)
        else:
            await self._stream(call, reply, send)

    async def _stream(self, call: Call, reply: Events, send: Send) -> None:
        headers = [(b"content-type", reply.media_type), NO_STORE]
        headers += [(b"x-accel-buffering", b"no"), *reply.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        limit_s = self.service.config.send_timeout_s
        with StallWatch(send, limit_s, call.scope["state"][ABORT]) as watch:
            try:
                async for frame in reply.frames:
                    await watch.send(_part(frame))
            except Exception as error:  # the fault boundary of a stream: it ends by saying so
                await watch.send(_part(self._event_of(error, call)))
            await watch.send(_part(b"", more=False))

    def _event_of(self, error: Exception, call: Call) -> bytes:
        call.log.update(logged(error))
        shown = public(error)
        if shown is not error:
            log.error("stream failed", exc_info=error, extra={"request_id": call.request_id})
        return self.endpoint.style.event(shown)


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


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
