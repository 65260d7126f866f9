"""A client of OpenAI's chat API that times what comes. Knows HTTP/1.1 and SSE, no server."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import MlxinferError

TIMEOUT_S = 600.0
Messages = Sequence[dict[str, str]]


@dataclass(slots=True)
class Heard:
    """One answer, in monotonic seconds."""

    sent_s: float
    pieces_s: list[float] = field(default_factory=list)  # when each piece of text came
    text: str = ""
    num_tokens: int = 0  # as the server counts
    ended_s: float = 0.0

    @property
    def first_s(self) -> float:
        """Seconds until the first text."""
        return (self.pieces_s[0] if self.pieces_s else self.ended_s) - self.sent_s

    @property
    def longest_gap_s(self) -> float:
        """Between two pieces of text."""
        pairs = zip(self.pieces_s, self.pieces_s[1:], strict=False)
        return max([late - early for early, late in pairs], default=0.0)


async def chat(
    port: int, messages: Messages, max_tokens: int, heard: Heard | None = None, **fields: Any
) -> Heard:
    """Ask for a streamed answer and hear it to its end.

    Args:
        heard: is filled while the answer comes, for whoever watches.
        fields: of the request, beside messages and max_tokens.

    Raises:
        MlxinferError: the server answered with an error.
    """
    body = {
        "model": "default_model",
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    heard = heard or Heard(0.0)
    heard.sent_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_request(port, json.dumps(body).encode()))
            await writer.drain()
            status = await reader.readline()
            if b" 200 " not in status:
                raise MlxinferError(f"The server said {status!r}: {await reader.read(2000)!r}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    _hear(heard, json.loads(line[6:]))
                elif line.startswith(b"data: [DONE]"):
                    break
        finally:
            writer.close()
    heard.ended_s = time.monotonic()
    return heard


def _request(port: int, body: bytes) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _hear(heard: Heard, event: dict[str, Any]) -> None:
    if "error" in event:
        raise MlxinferError(f"The server broke off: {event['error']}")
    if event.get("usage"):
        heard.num_tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = (delta.get("content") or "") + (delta.get("reasoning") or "")
        text += delta.get("reasoning_content") or ""
        if text:
            heard.pieces_s.append(time.monotonic())
            heard.text += text
