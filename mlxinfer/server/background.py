"""Slow work beside the event loop, in threads that do not hold up the end of the process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
            _tell(loop, future, future.set_exception, error)
        else:
            _tell(loop, future, future.set_result, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _tell(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[T]",
    settle: Callable[[Any], None],
    outcome: Any,
) -> None:
    def on_loop() -> None:
        if not future.done():  # else whoever waited has given up
            settle(outcome)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(on_loop)
