"""What a handler gives back: one JSON body, or a stream of events. Knows HTTP, no API."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Send

_encoder = msgspec.json.Encoder()

Headers = list[tuple[bytes, bytes]]
NO_STORE = (b"cache-control", b"no-store")


@dataclass(slots=True)
class Body:
    """A complete answer."""

    content: bytes
    status: int = 200
    media_type: bytes = b"application/json"
    headers: Headers = field(default_factory=list)


@dataclass(slots=True)
class Events:
    """Server-sent events. `frames` come as they are to be sent, several at a time or one."""

    frames: AsyncIterator[bytes]


Reply = Body | Events


def encode(value: Any) -> bytes:
    """JSON of structs and plain data."""
    return _encoder.encode(value)


def json_body(value: Any, status: int = 200) -> Body:
    """A struct or plain data as a JSON answer."""
    return Body(encode(value), status)


async def send_body(send: Send, reply: Body) -> None:
    """Send a complete answer."""
    headers = [
        (b"content-type", reply.media_type),
        (b"content-length", str(len(reply.content)).encode()),
        NO_STORE,
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.content, "more_body": False})
