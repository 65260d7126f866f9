"""One line on a terminal that says what an answer waits for, until its first word."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

from ..outputs import Delta

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

PATIENCE_S = 0.7  # in which most answers begin
TURN = "waiting for its turn…"  # nothing of the prompt is computed yet


class WaitingLine:
    """What an answer waits for: its turn, then its prompt with a percentage and the time left.

    Nothing is written before PATIENCE_S, nor where the console is no terminal.
    """

    def __init__(self, console: "Console") -> None:
        self._console, self._text = console, TURN
        self._first: tuple[float, int] | None = None  # when, and the tokens that were computed
        self._lock, self._ended = Lock(), False
        self._status: Status | None = None
        self._timer = Timer(PATIENCE_S, self._show)
        self._timer.daemon = True

    def begin(self) -> None:
        """Write the line soon."""
        if self._console.is_terminal:
            self._timer.start()

    def read(self, computed: int, total: int) -> None:
        """Say how far the prompt is; as `prompt_progress_callback`."""
        now_s = time.monotonic()
        first_s, at_first = self._first = self._first or (now_s, computed)
        done, left = computed - at_first, total - computed
        self._text = f"reading {total:,} tokens: {100 * computed // total} %"
        if done and (left_s := (now_s - first_s) * left / done) >= 1:
            self._text += f", {left_s:.0f} s left"
        with self._lock:
            if self._status is not None:
                self._status.update(self._text)

    def end(self) -> None:
        """Remove the line, and write none any more."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._status is not None:
                self._status.stop()
                self._status = None

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._status = self._console.status(self._text)
                self._status.start()


@contextmanager
def until_first_word(line: WaitingLine, deltas: Iterator[Delta]) -> Iterator[Iterator[Delta]]:
    """The same deltas; the line stands until the first one, or an error."""

    def watched() -> Iterator[Delta]:
        for delta in deltas:
            line.end()
            yield delta

    line.begin()
    try:
        yield watched()
    finally:
        line.end()
