"""`mlxinfer bench serve`: load against any server with OpenAI's chat API. Knows no engine.

`ChatClient` notes when each piece of an answer came. A failure is part of the answer, because a
load test counts failures.
"""

import contextlib
import http.client
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..errors import InvalidRequestError, ServerError
from ..http_json import exchange
from .report import Report, Table
from .speed import WORDS

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
        return (self.pieces_s[0] if self.pieces_s else self.ended_s) - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
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


# -- the load -------------------------------------------------------------------------------------

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The requests that a server gets."""

    url: str  # with or without /v1
    model: str | None = None  # its name there; None: the first that the server lists
    requests: int = 64  # in all
    # most requests in flight; None: 8, or no limit where a rate is given
    concurrency: int | None = None
    # arrivals a second, at random times (Poisson); None: one comes when one is answered
    rate: float | None = None
    prompt_tokens: tuple[int, int] = (256, 256)  # least and most, in words of about one token
    answer_tokens: tuple[int, int] = (128, 128)  # least and most of `max_tokens`
    # asks for answers of full length; servers that do not know it end earlier
    ignore_eos: bool = False
    temperature: float = 0.0  # of all requests
    seed: int = 0  # of lengths, words and times
    timeout_s: float = 600.0  # of silence
    key: str | None = None  # of the server

    @property
    def most_in_flight(self) -> int:
        return self.concurrency or (self.requests if self.rate else 8)


def run(load: ServerLoad) -> Report:
    """Put the load on the server and sum up the answers.

    Raises:
        ServerError: no server answers at the URL, or it lists no models.
        InvalidRequestError: the URL is none.
    """
    client = ChatClient(load.url, key=load.key, timeout_s=load.timeout_s)
    load = replace(load, model=load.model or _first_model(client, load))
    started = time.monotonic()
    answers = _play(client, load)
    seconds = time.monotonic() - started
    figures = summary(answers, seconds)
    settings = {name: value for name, value in asdict(load).items() if name != "key"}
    return Report("serve", _tables(figures, load), {"load": settings, **figures})


def _first_model(client: ChatClient, load: ServerLoad) -> str:
    models = exchange(client.base, "/v1/models", None, key=load.key, timeout_s=load.timeout_s)
    try:
        return str(models["data"][0]["id"])
    except (KeyError, TypeError, IndexError):
        raise ServerError(
            f"The server at {load.url} lists no models; say which with --model."
        ) from None


def bodies(load: ServerLoad) -> Iterator[dict[str, Any]]:
    """Requests of the load, the same for the same seed; no two prompts begin alike."""
    drawn = random.Random(load.seed)
    for _ in range(load.requests):
        count = drawn.randint(*load.prompt_tokens)
        words = [f"{drawn.randrange(1 << 30)}", *drawn.choices(WORDS.split(), k=max(count - 4, 1))]
        yield {
            "model": load.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": drawn.randint(*load.answer_tokens),
            "temperature": load.temperature,
            **({"ignore_eos": True} if load.ignore_eos else {}),
        }


def arrivals(load: ServerLoad) -> Iterator[float]:
    drawn = random.Random(f"{load.seed} arrivals")
    due = 0.0
    for _ in range(load.requests):
        yield due
        due += 0.0 if load.rate is None else drawn.expovariate(load.rate)


def _play(client: ChatClient, load: ServerLoad) -> list[TimedAnswer]:
    """Every request in a thread of its own for as long as it lasts."""
    started = time.monotonic()
    running: list[Future[TimedAnswer]] = []
    with ThreadPoolExecutor(load.most_in_flight, "client") as threads:
        try:
            for body, due in zip(bodies(load), arrivals(load), strict=True):
                time.sleep(max(0.0, started + due - time.monotonic()))
                running.append(threads.submit(client.chat, body))
            return [future.result() for future in running]
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            client.hang_up()
            raise


def summary(answers: Sequence[TimedAnswer], seconds: float) -> dict[str, Any]:
    """Counts, rates and percentiles; failed answers count as errors alone."""
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    per_token = [
        seconds_each for answer in good if (seconds_each := answer.seconds_per_token) is not None
    ]
    return {
        "completed": len(good),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "answer_tokens": sum(answer.num_tokens for answer in good),
        "prompt_tokens_per_s": sum(answer.prompt_tokens for answer in good) / seconds,
        "answer_tokens_per_s": sum(answer.num_tokens for answer in good) / seconds,
        "first_token_s": _spread([answer.first_s for answer in good]),
        "seconds_per_token": _spread(per_token),
        "gap_s": _spread([gap for answer in good for gap in answer.gaps_s]),
        "whole_answer_s": _spread([answer.ended_s - answer.sent_s for answer in good]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and the largest; empty for no values."""
    if not values:
        return {}
    percentiles = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": max(values)}


# -- tables -----------------------------------------------------------------------------------


def _tables(figures: dict[str, Any], load: ServerLoad) -> list[Table]:
    rates = [
        ["requests completed / failed", f"{figures['completed']:,} / {figures['failed']:,}"],
        ["seconds", f"{figures['seconds']:,.2f}"],
        ["requests/s", f"{figures['requests_per_s']:,.2f}"],
        ["prompt tokens/s", f"{figures['prompt_tokens_per_s']:,.1f}"],
        ["answer tokens/s", f"{figures['answer_tokens_per_s']:,.1f}"],
    ]
    about = f"{load.most_in_flight} requests at once"
    if load.rate is not None:
        about = f"{load.rate:g} requests a second, at most {about}"
    title = f"{load.url}, model {load.model}: {about}"
    times = [
        [
            label,
            *(f"{figures[name][key] * 1e3:,.1f}" for key in ("mean", "p50", "p90", "p99", "max")),
        ]
        for label, name in (
            ("first token", "first_token_s"),
            ("each further token", "seconds_per_token"),
            ("gap between pieces of text", "gap_s"),
            ("whole answer", "whole_answer_s"),
        )
        if figures[name]
    ]
    tables = [Table(title, ["", ""], rates)]
    if times:
        columns = ["milliseconds", "mean", "p50", "p90", "p99", "max"]
        tables.append(Table("As clients saw it", columns, times))
    if figures["errors"]:
        rows = [[error, f"{count:,}"] for error, count in figures["errors"].items()]
        tables.append(Table("Errors", ["", "requests"], rows))
    return tables
