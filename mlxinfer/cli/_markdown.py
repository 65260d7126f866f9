"""Answers that are shown while they grow: as Markdown on a terminal, as they are elsewhere.

Rendering the whole answer again with each token costs tens of milliseconds for a few thousand
characters, and is cut off where it is taller than the screen. So a finished block (paragraph, list,
table, fenced code) is printed once and scrolls away, and only the open block is drawn again. Until
the first word a line says what the answer waits for.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, ClassVar

from ._output import printable, styled

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.segment import Segment
    from rich.status import Status

    from ..outputs import Delta

FRAME_S = 0.06  # at most one redraw in this time
PATIENCE_S = 0.7  # in which most answers begin
TURN = "waiting for its turn…"  # nothing of the prompt is computed yet


def split_finished(text: str) -> tuple[str, str]:
    """Split into (blocks that no later text can change, the rest).

    CommonMark is read from left to right: only the last block can still grow.
    """
    starts = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map]
    lines = text.splitlines(keepends=True)
    end = max(starts, default=0)
    return "".join(lines[:end]), "".join(lines[end:])


@cache
def _parser() -> "MarkdownIt":
    from ..display.markdown import new_parser

    return new_parser()


@cache
def _markdown_class() -> "type[Markdown]":
    """rich's Markdown by the parser of notebooks: formulas as written, headings on the left."""
    from rich.markdown import Heading, Markdown

    class LeftHeading(Heading):
        LEVEL_ALIGN: ClassVar = dict.fromkeys(Heading.LEVEL_ALIGN, "left")

    class ChatMarkdown(Markdown):
        elements: ClassVar = {**Markdown.elements, "heading_open": LeftHeading}

        def __init__(self, text: str, style: str) -> None:
            super().__init__("", style=style)
            self.markup, self.parsed = text, _parser().parse(text)

    return ChatMarkdown


def rendered(text: str, style: str = "none") -> "Markdown":
    return _markdown_class()(text, style=style)


class MarkdownStream:
    """Shows fed text on a terminal as it arrives.

    finish() prints the open block, and the stream can be used again.
    """

    def __init__(self, console: "Console", *, style: str = "none") -> None:
        self._console = console
        self._style = style
        self._open = ""
        self._live: Live | None = None
        self._drawn_s = 0.0

    def feed(self, text: str) -> None:
        self._open += printable(text)
        if "\n" in text:  # blocks begin with lines
            finished, self._open = split_finished(self._open)
            if finished:
                self._print(finished)
        self._draw()

    def finish(self) -> None:
        if self._open.strip():
            self._print(self._open)
        self._open = ""

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        lines = self._lines(text)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        while lines and _is_blank(lines[0]):
            del lines[0]
        from rich.segment import SegmentLines

        self._console.print(SegmentLines([*lines, []], new_lines=True), end="")

    def _draw(self) -> None:
        """Draw the open block, or only its end where it is taller than the screen."""
        now = time.monotonic()
        if not self._open.strip() or now - self._drawn_s < FRAME_S:
            return
        from rich.live import Live
        from rich.segment import SegmentLines

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        lines = self._lines(self._open)[-max(1, self._console.height - 2) :]
        self._live.update(SegmentLines(lines, new_lines=True), refresh=True)
        self._drawn_s = now

    def _lines(self, text: str) -> "list[list[Segment]]":
        return self._console.render_lines(rendered(text, self._style), pad=False)


class AnswerStream:
    """Shows an answer as it arrives: its Markdown, and before it the thoughts, dim."""

    def __init__(self, console: "Console", *, thoughts: bool) -> None:
        self._thoughts = MarkdownStream(console, style="dim") if thoughts else None
        self._text = MarkdownStream(console)

    def feed(self, delta: "Delta") -> None:
        if self._thoughts is not None and delta.reasoning:
            self._thoughts.feed(delta.reasoning)
        if delta.text:
            if self._thoughts is not None:
                self._thoughts.finish()
            self._text.feed(delta.text)

    def finish(self) -> None:
        if self._thoughts is not None:
            self._thoughts.finish()
        self._text.finish()


class PlainStream:
    """Writes an answer to a stream as it is, and its thoughts to another, dim, if there is one."""

    def __init__(self, stream: IO[str], thoughts: IO[str] | None) -> None:
        self._stream, self._thoughts = stream, thoughts
        self._last = "\n"

    def feed(self, delta: "Delta") -> None:
        if self._thoughts is not None and delta.reasoning:
            self._thoughts.write(styled(printable(delta.reasoning), "2", self._thoughts))
            self._thoughts.flush()
        if delta.text:
            self._stream.write(printable(delta.text) if self._stream.isatty() else delta.text)
            self._stream.flush()
            self._last = delta.text[-1]

    def finish(self) -> None:
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()


def _is_blank(line: "list[Segment]") -> bool:
    return not "".join(segment.text for segment in line).strip()


# -- until the first word -------------------------------------------------------------------------


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
def until_first_word(line: WaitingLine, deltas: "Iterator[Delta]") -> "Iterator[Iterator[Delta]]":
    """Yield the deltas; the line is shown until the first one comes, or an error."""

    def watched() -> "Iterator[Delta]":
        for delta in deltas:
            line.end()
            yield delta

    line.begin()
    try:
        yield watched()
    finally:
        line.end()
