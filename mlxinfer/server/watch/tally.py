"""Numbers of one model's requests, in vLLM's words. Knows no format; nothing is locked.

Everything happens on the event loop, and a token costs a bisection and a few additions.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ...results import Result

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
        """(upper bound, values up to it), as Prometheus wants them."""
        names = [*map(str, self._bounds), "+Inf"]
        return zip(names, accumulate(self._counts), strict=True)


def _times() -> Histogram:
    return Histogram(REQUEST_S)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class Tally:
    """What happened to the requests of one model since the server started.

    `*_s` are seconds. A request is one answer: a call with n=3 has three.
    """

    num_waiting: int = 0  # handed to the engine, without a token
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
    max_tokens: Histogram = field(default_factory=_tokens)  # as asked
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))

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
