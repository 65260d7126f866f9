"""Slow work beside the event loop, in threads that do not hold up the end of the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> "Future[T]":
    """Call a function in a daemon thread of its own; its result or error comes as a future.

    `asyncio.wrap_future` makes it one to await. `asyncio.to_thread` would make the process wait at
    its end for a thread that is stuck.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # who waits may give up; what runs cannot

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # it belongs to whoever waits for the outcome
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
