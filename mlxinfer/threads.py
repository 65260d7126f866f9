"""Threads for callers that Ctrl-C may interrupt at any point. Knows no engine and no grammar.

A signal handler runs on the main thread between two of its bytecodes, and may raise there. A lock
that is held at that moment stays locked for ever. The lock of an Event, a Condition or a Future is
taken by Python code, and so are those of `Thread.start`, `Timer` and `subprocess`. A C lock, which
`with` takes directly, and a SimpleQueue have no such moment. So callers use only these two, and
wait for a SimpleQueue by `take`. Everything else runs on its own threads, where no handler runs.
"""

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SIGNAL_CHECK_S = 0.25  # longest that a waiting main thread takes to notice a signal


def take(items: queue.SimpleQueue[T]) -> T:
    """Wait for the next item of a queue, noticing signals within `SIGNAL_CHECK_S`.

    A signal that arrives after the last bytecode before `get` blocks wakes nothing: its Python
    handler would run only when an item comes. So `get` returns to the interpreter regularly.
    """
    while True:
        try:
            return items.get(timeout=SIGNAL_CHECK_S)
        except queue.Empty:
            continue


class Reply(Generic[T]):
    """One value, or error, from one thread to another that waits for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]]
        self._queue = queue.SimpleQueue()

    def put(self, value: T) -> None:
        """Let `wait` return."""
        self._queue.put((value, None))

    def fail(self, error: BaseException) -> None:
        """Let `wait` raise."""
        self._queue.put((None, error))

    def of(self, function: Callable[[], T]) -> None:
        """Call a function and put what it returns, or raises."""
        try:
            self.put(function())
        except BaseException as error:  # raised where the reply is waited for
            self.fail(error)

    def wait(self) -> T:
        """Return the value, or raise the error, once it is there. Only one call gets it."""
        value, error = take(self._queue)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return value  # type: ignore[return-value]  # no error: a T


def start(thread: threading.Thread, failed: Callable[[BaseException], None]) -> None:
    """Start a thread from one that no signal handler interrupts: `Thread.start` waits for an Event.

    Args:
        failed: called with the reason where the thread cannot be started.

    Raises:
        RuntimeError: there can be no more threads.
    """

    def work() -> None:
        try:
            thread.start()
        except BaseException as error:  # raised where the thread's work is waited for
            failed(error)

    _thread.start_new_thread(work, ())


def run_apart(function: Callable[[], T], name: str) -> T:
    """Call a function on a thread of its own, and return or raise what it does.

    It goes on where the caller is interrupted, so that it comes to an orderly end.
    """
    reply: Reply[T] = Reply()
    thread = threading.Thread(target=reply.of, args=(function,), name=name, daemon=True)
    start(thread, reply.fail)
    return reply.wait()
