"""`mlxinfer bench serve`: load against any server with OpenAI's chat API. Knows no engine."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..http_json import ServerError, exchange
from .client import ChatClient, TimedAnswer
from .report import Report, Table
from .speed import WORDS

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The requests that a server gets.

    Attributes:
        url: with or without /v1.
        model: its name there; None: the first that the server lists.
        requests: in all.
        concurrency: requests in flight, at most; None: 8, or all of them where a rate is given.
        rate: arrivals a second, at random times (Poisson); None: one comes when one is answered.
        prompt_tokens: least and most, in words of about one token.
        answer_tokens: least and most of `max_tokens`.
        ignore_eos: asks for answers of full length; servers that do not know it end earlier.
        temperature: of all requests.
        seed: of lengths, words and times.
        timeout_s: of silence.
        key: of the server.
    """

    url: str
    model: str | None = None
    requests: int = 64
    concurrency: int | None = None
    rate: float | None = None
    prompt_tokens: tuple[int, int] = (256, 256)
    answer_tokens: tuple[int, int] = (128, 128)
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0
    key: str | None = None

    @property
    def most_in_flight(self) -> int:
        """Requests at once, at most."""
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
    found = summary(answers, seconds)
    settings = {name: value for name, value in asdict(load).items() if name != "key"}
    return Report("serve", _tables(found, load), {"load": settings, **found})


def _first_model(client: ChatClient, load: ServerLoad) -> str:
    found = exchange(client.base, "/v1/models", None, key=load.key, timeout_s=load.timeout_s)
    try:
        return str(found["data"][0]["id"])
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
    """Seconds from the start at which each request is due."""
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
            return [each.result() for each in running]
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            client.hang_up()
            raise


def summary(answers: Sequence[TimedAnswer], seconds: float) -> dict[str, Any]:
    """Counts, rates and percentiles; failed answers count as errors alone."""
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    per_token = [each for answer in good if (each := answer.seconds_per_token) is not None]
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
    found = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": max(values)}


# -- tables -----------------------------------------------------------------------------------


def _tables(found: dict[str, Any], load: ServerLoad) -> list[Table]:
    rates = [
        ["requests completed / failed", f"{found['completed']:,} / {found['failed']:,}"],
        ["seconds", f"{found['seconds']:,.2f}"],
        ["requests/s", f"{found['requests_per_s']:,.2f}"],
        ["prompt tokens/s", f"{found['prompt_tokens_per_s']:,.1f}"],
        ["answer tokens/s", f"{found['answer_tokens_per_s']:,.1f}"],
    ]
    about = f"{load.most_in_flight} requests at once"
    if load.rate is not None:
        about = f"{load.rate:g} requests a second, at most {about}"
    title = f"{load.url}, model {load.model}: {about}"
    times = [
        [label, *(f"{found[name][key] * 1e3:,.1f}" for key in ("mean", "p50", "p90", "p99", "max"))]
        for label, name in (
            ("first token", "first_token_s"),
            ("each further token", "seconds_per_token"),
            ("gap between pieces of text", "gap_s"),
            ("whole answer", "whole_answer_s"),
        )
        if found[name]
    ]
    tables = [Table(title, ["", ""], rates)]
    if times:
        columns = ["milliseconds", "mean", "p50", "p90", "p99", "max"]
        tables.append(Table("As clients saw it", columns, times))
    if found["errors"]:
        rows = [[error, f"{count:,}"] for error, count in found["errors"].items()]
        tables.append(Table("Errors", ["", "requests"], rows))
    return tables
