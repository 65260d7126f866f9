"""Threads beside the event loop: a bounded pool for texts, and threads for work that may hang."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from ..errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> "Future[T]":
    """Call a function in a daemon thread of its own; returns a future of its result or error.

    With `asyncio.to_thread` a stuck thread would keep the process from ending.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # so it cannot be cancelled

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # raised where the future is awaited
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def apart(function: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """The same as a future of the running event loop."""
    return asyncio.wrap_future(in_background(function, name))


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
        try:
            work = self._pool.submit(_guarded, partial(function, *args, **kwargs))
            return await asyncio.wrap_future(work)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Cancel the functions that wait; those that run end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class PanicError(Exception):
    """Replaces the exception of a panic in Rust, which is no Exception and would end the server."""


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:  # only what is no Exception is wrapped
        raise
    except BaseException as panic:  # the fault boundary of a thread
        raise PanicError(f"{type(panic).__name__}: {panic}") from panic
