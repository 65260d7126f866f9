"""Slow functions in daemon threads, which do not delay the end of the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> "Future[T]":
    """Call a function in a daemon thread of its own; returns a future of its result or error.

    `asyncio.wrap_future` makes it awaitable. With `asyncio.to_thread` a stuck thread would keep the
    process from ending.
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
