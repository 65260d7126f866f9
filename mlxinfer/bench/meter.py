"""Where the CPU time of a thread goes, in named accounts. Knows no models.

Thread CPU time counts neither waiting nor what other threads and processes do, so it is steady on a
busy machine. On the CPU backend the arithmetic runs on MLX's own threads and is not counted either.
"""

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

Evaluation = Callable[..., Any]
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


def metered_evaluation(meter: Meter) -> AbstractContextManager[None]:
    """Count the time inside mx.eval and mx.async_eval, whoever calls them."""
    return _listening(lambda function: meter.timed(DISPATCH, function))


@contextmanager
def counted_operations() -> Iterator[list[int]]:
    """How many operations each graph has that is evaluated meanwhile."""
    counts: list[int] = []

    def counted(function: Evaluation) -> Evaluation:
        def count(*arrays: Any) -> None:
            text = io.StringIO()
            mx.export_to_dot(text, *[array for _, array in tree_flatten(arrays)])
            counts.append(text.getvalue().count("label ="))
            function(*arrays)

        return count

    with _listening(counted):
        yield counts


@contextmanager
def _listening(around: Callable[[Evaluation], Evaluation]) -> Iterator[None]:
    """Both libraries look up mx.eval and mx.async_eval when they call them: so here is where to
    listen. MLX is as before afterwards.
    """
    originals = mx.eval, mx.async_eval
    mx.eval, mx.async_eval = around(mx.eval), around(mx.async_eval)
    try:
        yield
    finally:
        mx.eval, mx.async_eval = originals
