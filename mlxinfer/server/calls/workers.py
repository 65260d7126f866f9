"""Text work off the event loop: a few threads, and a bound on what waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from ...errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Runs functions in threads. They limit their own time: a thread cannot be interrupted.

    Args:
        num_threads: that work at once.
        max_waiting: functions that may wait for a thread.
    """

    def __init__(self, num_threads: int, max_waiting: int = 256) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mlxinfer-text")
        self._max_pending = num_threads + max_waiting
        self._pending = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread and return its result.

        Raises:
            OverloadedError: too many wait.
            PanicError: a library panicked.
            whatever else the function raises.
        """
        if self._pending >= self._max_pending:
            raise OverloadedError("Too many prompts wait to be encoded; try again soon.")
        self._pending += 1
        future = self._pool.submit(_guarded, partial(function, *args, **kwargs))
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Drop what waits; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class PanicError(Exception):
    """What a library in Rust raises when it panics; theirs is no Exception, and ends servers."""


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:
        raise
    except BaseException as panic:  # the fault boundary of a thread
        raise PanicError(f"{type(panic).__name__}: {panic}") from panic


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
