"""Where the CPU time of a thread goes, in named accounts. Knows no models.

Thread CPU time counts neither waiting nor what other threads and processes do, so it is steady on a
busy machine. On the CPU backend the arithmetic runs on MLX's own threads and is not counted either.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

FORWARD = "forward"  # building the graph of the model: calls, attention, logits
PLAN = "plan"  # what the KV cache works out before the forward pass
DISPATCH = "dispatch"  # mx.eval and mx.async_eval: handing the graph to the backend


class Meter:
    """Seconds of the calling thread's CPU time by account."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, account: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `account`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[account] += time.thread_time() - started

        return measured


@contextmanager
def metered_evaluation(meter: Meter) -> Iterator[None]:
    """Count the time inside mx.eval and mx.async_eval, whoever calls them.

    Both libraries look these up when they call them, so that is where to listen; MLX is as before
    afterwards.
    """
    originals = mx.eval, mx.async_eval
    mx.eval = meter.timed(DISPATCH, mx.eval)
    mx.async_eval = meter.timed(DISPATCH, mx.async_eval)
    try:
        yield
    finally:
        mx.eval, mx.async_eval = originals
