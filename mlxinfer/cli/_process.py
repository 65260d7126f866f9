"""The process of every command: standard streams, a home folder, and the effect of Ctrl-C."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130  # the exit code, as shells have it


def open_missing_streams() -> None:
    """Open the null device for a standard stream that the parent process closed (`>&-`).

    Otherwise the next file to be opened gets the stream's number, and its output.
    """
    if not _is_open(0):
        os.open(os.devnull, os.O_RDONLY)  # gets the lowest number that is free
        sys.stdin = os.fdopen(0, closefd=False)
    if not _is_open(1):
        os.open(os.devnull, os.O_WRONLY)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if not _is_open(2):
        os.open(os.devnull, os.O_WRONLY)
        sys.stderr = os.fdopen(2, "w", closefd=False)


def ensure_home() -> None:
    """Set HOME to `/` for a user without one, as in a container."""
    try:
        Path.home()
    except RuntimeError:  # no HOME, and no entry in the system's list of users
        os.environ["HOME"] = "/"


@contextmanager
def ending_at_interrupts() -> Iterator[None]:
    """Meanwhile Ctrl-C ends the process at once, unless it has another handler already.

    An interrupt within an import would print a traceback, or be lost.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    end_at_next_interrupt()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_at_next_interrupt() -> None:
    """Let one more Ctrl-C end the process at once, while it ends because of the first."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
