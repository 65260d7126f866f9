"""What every command counts on: streams, a home, and how Ctrl-C ends it. Knows no command."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130  # the exit code, as shells have it


def open_missing_streams() -> None:
    """Put the null device where whoever started us left a standard stream closed (`>&-`).

    Otherwise the next file that is opened gets its number, and is what others take for a stream.
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


def settle_home() -> None:
    """Let a user who has no home, as in a container, live in `/`: nothing of theirs is there."""
    try:
        Path.home()
    except RuntimeError:  # no HOME, and no entry in the system's list of users
        os.environ["HOME"] = "/"


@contextmanager
def ending_at_interrupts() -> Iterator[None]:
    """Meanwhile Ctrl-C ends the process where it stands, unless it means something else already.

    An interrupt within an import is a traceback, or is lost.
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
    """The process ends, and Ctrl-C came already: one more ends it where it stands."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
