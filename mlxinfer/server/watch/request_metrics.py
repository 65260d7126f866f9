"""Metrics of the requests of one model, under vLLM's names: histograms, counters, the meter.

Everything happens on the event loop, so nothing is locked. A token costs a bisection and a few
additions.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from ...core import Request, TokenEvent
from ...outputs import Result

# vLLM's buckets, so that its dashboards and alerts fit (vllm/v1/metrics/loggers.py)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of values by upper bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterable[tuple[str, int]]:
        """Pairs of an upper bound and the number of values up to it, as Prometheus has them."""
        names = [*map(str, self._bounds), "+Inf"]
        return zip(names, accumulate(self._counts), strict=True)


def _times() -> Histogram:
    return Histogram(REQUEST_S)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class RequestMetrics:
    """Counters and histograms of the requests of one model since the server started.

    `*_s` are seconds. A request is one answer: a call with n=3 has three.
    """

    num_waiting: int = 0  # submitted to the engine, without a token
    num_running: int = 0  # with a token
    num_rejected: int = 0  # calls that found the queue full
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))
    per_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))  # mean of a request
    e2e_s: Histogram = field(default_factory=_times)
    queue_s: Histogram = field(default_factory=_times)
    prefill_s: Histogram = field(default_factory=_times)
    decode_s: Histogram = field(default_factory=_times)
    inference_s: Histogram = field(default_factory=_times)  # prefill and decode
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_tokens: Histogram = field(default_factory=_tokens)
    longest_tokens: Histogram = field(default_factory=_tokens)  # of the answers of a call
    max_tokens: Histogram = field(default_factory=_tokens)  # as the request says
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))

    @contextmanager
    def pooling(self, num_tokens: int) -> Iterator[None]:
        """Count a request for vectors or scores of so many tokens, while the block runs."""
        began_s, reason = time.monotonic(), "error"
        self.num_running += 1
        try:
            yield
            reason = "stop"
            self.prompt_tokens += num_tokens
            self.request_prompt_tokens.observe(num_tokens)
            self.e2e_s.observe(time.monotonic() - began_s)
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            self.num_running -= 1
            self.finished[reason] += 1

    def finish(self, reason: str, result: Result | None) -> None:
        """Count a request that has ended, with its times where it was answered."""
        self.finished[reason] += 1
        if result is None:
            return
        timing, num_tokens = result.timing, len(result.token_ids)
        self.e2e_s.observe(timing.total_s)
        self.queue_s.observe(timing.queued_s)
        self.prefill_s.observe(timing.prefill_s)
        self.decode_s.observe(timing.decode_s)
        self.inference_s.observe(timing.prefill_s + timing.decode_s)
        self.request_prompt_tokens.observe(result.prompt_tokens)
        self.request_tokens.observe(num_tokens)
        if num_tokens > 1:
            self.per_token_s.observe(timing.decode_s / (num_tokens - 1))


class Meter:
    """Counts the requests of one call in their model's metrics, each from waiting to its end.

    Every request is ended exactly once, by `end` or by `close`.
    """

    def __init__(self, metrics: RequestMetrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._requests = requests
        self._last_token_s: list[float | None] = [None] * len(requests)
        self._num_tokens = [0] * len(requests)
        self._open: set[int] = set()
        self._counted_prompts: set[int] = (
            set()
        )  # identities: choices share the list of their prompt

    def begin(self) -> None:
        """Count all requests as waiting; called before they are submitted to the engine."""
        self._open.update(range(len(self._requests)))
        self._metrics.num_waiting += len(self._requests)

    def refuse(self, *, full: bool = False) -> None:
        """Take `begin` back: the requests were not submitted. `full`: the queue was full."""
        if full:
            self._metrics.num_rejected += 1
        self._metrics.num_waiting -= len(self._open)
        self._open.clear()

    def record(self, index: int, event: TokenEvent) -> None:
        """Count the token of an event, if it has one."""
        if event.token_id is None:
            return
        metrics, now_s, before_s = self._metrics, time.monotonic(), self._last_token_s[index]
        self._last_token_s[index] = now_s
        self._num_tokens[index] += 1
        metrics.generation_tokens += 1
        if before_s is not None:
            metrics.inter_token_s.observe(now_s - before_s)
            return
        request = self._requests[index]
        metrics.num_waiting -= 1
        metrics.num_running += 1
        if id(request.prompt_ids) not in self._counted_prompts:
            self._counted_prompts.add(id(request.prompt_ids))
            metrics.prompt_tokens += len(request.prompt_ids)
            metrics.cached_tokens += event.cached_tokens
        metrics.first_token_s.observe(now_s - request.arrived_s)

    def end(self, index: int, reason: str, result: Result | None = None) -> None:
        """Count the end of a request, with its result where it was answered."""
        if index not in self._open:
            return
        self._open.discard(index)
        if self._last_token_s[index] is None:
            self._metrics.num_waiting -= 1
        else:
            self._metrics.num_running -= 1
        self._metrics.finish(reason, result)
        max_tokens = self._requests[index].params.max_tokens
        if max_tokens is not None:
            self._metrics.max_tokens.observe(max_tokens)
        if not self._open:
            self._metrics.choices.observe(len(self._requests))
            self._metrics.longest_tokens.observe(max(self._num_tokens))

    def close(self) -> None:
        """Count the requests that have not ended as aborted."""
        for index in list(self._open):
            self.end(index, "abort")
