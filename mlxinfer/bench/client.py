"""A streaming client of OpenAI's chat API that notes when each piece of an answer came.

`http.client` reads chunked bodies and speaks TLS; a connection is used once, and never through a
proxy. A failure is part of the answer, as a load test counts it.
"""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from ..errors import InvalidRequestError

MAX_ERROR_BYTES = 2000


@dataclass(slots=True)
class TimedAnswer:
    """One answer, while it comes and after; times are monotonic seconds."""

    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)  # when each piece of text came
    text: str = ""
    prompt_tokens: int = 0  # as the server counts
    num_tokens: int = 0  # of the answer, as the server counts
    ended_s: float = 0.0
    error: str | None = None

    @property
    def first_s(self) -> float:
        """Seconds until the first text."""
        return (self.pieces_s[0] if self.pieces_s else self.ended_s) - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two pieces of text."""
        return [late - early for early, late in pairwise(self.pieces_s)]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time from one token to the next; None for an answer of one token."""
        if self.num_tokens < 2 or not self.pieces_s:
            return None
        return (self.ended_s - self.pieces_s[0]) / (self.num_tokens - 1)


class ChatClient:
    """Requests to one server; may be used by many threads at once.

    Args:
        url: with or without /v1, such as "http://127.0.0.1:8080/v1".
        key: sent as a bearer token.
        timeout_s: of silence.

    Attributes:
        base: the URL without /v1.

    Raises:
        InvalidRequestError: the URL names no server.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(
                f"{url} is no address of a server; one looks like http://127.0.0.1:8080/v1",
                param="url",
            )
        secure = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._address, self._timeout_s = parts.netloc.rpartition("@")[2], timeout_s
        self.base = url.rstrip("/").removesuffix("/v1")
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._open: set[socket.socket] = set()

    def hang_up(self) -> None:
        """Break off all requests; their answers end with an error."""
        for opened in tuple(self._open):
            with contextlib.suppress(OSError):  # it ended meanwhile
                opened.shutdown(socket.SHUT_RDWR)

    def chat(self, body: Mapping[str, Any], answer: TimedAnswer | None = None) -> TimedAnswer:
        """Ask for a streamed answer, and read it to its end.

        Args:
            body: of the request; that it is streamed, and with usage, is added.
            answer: is filled while the answer comes, for others to watch.
        """
        answer = answer or TimedAnswer()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection = self._connection(self._address, timeout=self._timeout_s)
        answer.sent_s = time.monotonic()
        opened = None
        try:
            connection.connect()
            opened = connection.sock  # later the response has it, and the connection none
            self._open.add(opened)
            connection.request("POST", self._path, json.dumps(streamed).encode(), self._headers)
            self._read(connection.getresponse(), answer)
        except TimeoutError:
            answer.error = f"silent for {self._timeout_s:g} s"
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.error = str(error) or type(error).__name__
        finally:
            connection.close()
            self._open.discard(opened)
            answer.ended_s = time.monotonic()
        return answer

    def _read(self, response: http.client.HTTPResponse, answer: TimedAnswer) -> None:
        if response.status != 200:
            answer.error = f"status {response.status}: {_said(response.read(MAX_ERROR_BYTES))}"
            return
        while line := response.readline():
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), answer)
            elif line.startswith(b"data: [DONE]"):
                return
        answer.error = answer.error or "the stream ended before it was done"


def _take(event: Mapping[str, Any], answer: TimedAnswer) -> None:
    """Add one event of the stream to the answer."""
    if "error" in event:
        answer.error = _message(event)
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.num_tokens = usage["completion_tokens"]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        texts = (delta.get(name) for name in ("content", "reasoning", "reasoning_content"))
        if text := "".join(text for text in texts if text):
            answer.pieces_s.append(time.monotonic())
            answer.text += text


def _said(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return body.decode(errors="replace").strip()[:200]


def _message(event: Mapping[str, Any]) -> str:
    error = event.get("error") if isinstance(event, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or event)
