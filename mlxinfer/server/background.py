"""Slow work beside the event loop, in threads that do not hold up the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Call a function in a daemon thread of its own; its result or error comes as a future.

    `asyncio.to_thread` would make the process wait at its end for a thread that is stuck.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # it belongs to whoever awaits the future
            failure = error  # the name `error` ends with this block
            _call(loop, lambda: future.cancelled() or future.set_exception(failure))
        else:
            _call(loop, lambda: future.cancelled() or future.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop was closed: nobody waits any more
        return
