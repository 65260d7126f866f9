"""One exchange over HTTP: a request's headers, the parts of its reply, its line in the log."""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Coroutine
from typing import Any
from urllib.parse import parse_qs

from ..errors import MlxinferError, StorageFullError
from .http import (
    NO_STORE,
    Body,
    ClientGoneError,
    ErrorForm,
    Events,
    File,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    error_reply,
    logged,
    public,
)
from .protocol import ABORT

CLIENT_GONE = 499  # the log's status of a request after its client disconnected
POLLED = frozenset(  # logged at level info only on errors
    {"/health", "/ready", "/admin/state", "/hub/jobs", "/metrics"}
)
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
access_log = logging.getLogger("mlxinfer.access")
log = logging.getLogger("mlxinfer.server")


class Exchange:
    """A request and the reply to it, from its headers to its line in the log.

    Args:
        send_timeout_s: a client that takes a message for longer counts as disconnected.

    Attributes:
        request_id: in the log and in the x-request-id header; clients may choose it.
        log: what the access log shall say of it; never text of prompts or answers.
        status: of the reply, once it has begun.
    """

    def __init__(self, scope: Scope, send: Send, form: ErrorForm, send_timeout_s: float) -> None:
        self.scope, self.form = scope, form
        self._connection, self._send_timeout_s = send, send_timeout_s
        self._began_s = time.monotonic()
        given = self.header(b"x-request-id") or b""
        self.request_id = given.decode() if _ID.fullmatch(given) else secrets.token_hex(12)
        self.log: dict[str, Any] = {}
        self.status: int | None = None
        shown_id = self.request_id.encode()
        self.headers: Headers = [(name, shown_id) for name in (b"x-request-id", *form.id_headers)]

    @property
    def query(self) -> dict[str, str]:
        """The query of the path; of a repeated field the last value."""
        text = self.scope["query_string"].decode("ascii", "replace")
        return {name: values[-1] for name, values in parse_qs(text).items()}

    def header(self, name: bytes) -> bytes | None:
        return dict(self.scope["headers"]).get(name)

    async def send_events(self, reply: Events) -> None:
        """Send a stream. A client that takes a message too slowly counts as disconnected."""
        headers = [(b"content-type", reply.media_type), NO_STORE, (b"x-accel-buffering", b"no")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for frame in reply.frames:
                await self._put(frame)
        except Exception as error:  # the fault boundary of a stream: it ends by saying so
            await self._put(self.form.event(self.failure(error)))
        await self._put(b"", more=False)

    async def send_file(self, reply: File) -> None:
        """Send a file. Where a piece fails the connection breaks: no part passes for the whole."""
        left = reply.num_bytes
        headers = [
            (b"content-type", reply.media_type),
            (b"content-length", str(left).encode()),
            NO_STORE,
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for piece in reply.pieces:
                left -= len(piece)
                await self._put(piece, more=left > 0)  # the client may send more when it has all
        except Exception as error:  # the fault boundary of a download
            self.failure(error)
            self.scope["state"][ABORT]()

    async def _put(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of a reply, and break the connection where it is not taken in time."""
        limit_s, abort = self._send_timeout_s, self.scope["state"][ABORT]
        timer = asyncio.get_running_loop().call_later(limit_s, abort)
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
        timer.cancel()

    async def send_body(self, reply: Body) -> None:
        headers = [
            (b"content-type", reply.media_type),
            (b"content-length", str(len(reply.content)).encode()),
            *reply.headers,
        ]
        if b"cache-control" not in dict(reply.headers):
            headers.append(NO_STORE)
        await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": reply.content, "more_body": False})

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._connection(message)

    def failure(self, error: Exception) -> MlxinferError:
        self.log.update(logged(error))
        shown = public(error)
        if isinstance(shown, StorageFullError):
            log.warning("%s", shown, extra={"request_id": self.request_id})
        elif shown is not error:
            log.error("request failed", exc_info=error, extra={"request_id": self.request_id})
        return shown

    async def fail(self, error: Exception) -> None:
        shown = self.failure(error)
        if self.status is None:
            await self.send_body(error_reply(shown, self.form))

    def write_log(self) -> None:
        """Write one line, with nothing of the prompt or the answer."""
        client, path = self.scope.get("client"), self.scope["path"]
        status = CLIENT_GONE if self.status is None else self.status
        access_log.log(
            logging.DEBUG if path in POLLED and status == 200 else logging.INFO,
            "request",
            extra={
                "request_id": self.request_id,
                "method": self.scope["method"],
                "path": path,
                "status": status,
                "duration_ms": round(1000 * (time.monotonic() - self._began_s), 1),
                "client": client[0] if client else None,
                **self.log,
            },
        )


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; cancel it when the client hangs up."""
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
