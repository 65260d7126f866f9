"""How commands write: JSON, tables, sizes, dim text."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import IO, Any

import click

NARROW = 24  # characters; columns of a table are not made narrower
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline


def emit_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(text.encode(errors="backslashreplace").decode())  # half a pair is written as JSON does


def emit(data: Any, text: str, *, as_json: bool) -> None:
    """Write what a command has found: the data as JSON, or a text for people."""
    if as_json:
        emit_json(data)
    else:
        click.echo(text)


def human_count(count: float) -> str:
    """7241732096 -> '7.2 B'; 596049920 -> '596 M'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.1f} {unit}"
    return f"{count:.0f}"


def counted(count: int, what: str) -> str:
    """1, 'file' -> '1 file'; 2, 'file' -> '2 files'."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str] = ()) -> str:
    """Return left-aligned columns, two spaces apart, without borders, for awk and for people.

    Lines have room in a terminal: long cells are cut, or without a header wrapped.
    """
    lines: Sequence[Sequence[str]] = [header, *rows] if header else rows
    if header and sys.stdout.isatty():
        lines = _cut_columns(lines, shutil.get_terminal_size().columns)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return fitted(
        "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
    )


def _cut_columns(lines: Sequence[Sequence[str]], room: int) -> list[list[str]]:
    """Make the widest columns narrower until all have room; then leave out the last ones."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > NARROW:
        widths[widths.index(max(widths))] -= 1
    more: list[str] = []
    while sum(widths) + 2 * (len(widths) - 1) + 3 * len(more) > room and len(widths) > 1:
        widths.pop()
        more = ["…"]
    return [[cut(*pair) for pair in zip(line, widths, strict=False)] + more for line in lines]


def cut(cell: str, width: int) -> str:
    """Return a text with an ellipsis for what has no room: the beginning of a name, or last words.

    Names are org/name and layers.0.mlp: the end tells them from others. Only a part that is too
    long by itself is split.
    """
    if len(cell) <= width:
        return cell
    if words := cell[:width].rpartition(" ")[0]:
        return f"{words}…"
    parts = (cell[part.end() :] for part in re.finditer("[/.]", cell))
    end = next((end for end in parts if width // 2 < len(end) < width), cell[1 - width :])
    return f"…{end}"


def fitted(text: str) -> str:
    """Return the text, its lines broken between words where stdout is a narrower terminal."""
    if not sys.stdout.isatty():
        return text
    return wrapped(text, shutil.get_terminal_size().columns)


def colours(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal that may be coloured (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: IO[str]) -> str:
    """`text` in an ANSI style ("2" is dim, "31" red), plain where `stream` has no colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and colours(stream) else text


def printable(text: str) -> str:
    """Return `text` without control characters, with which a model could steer the terminal."""
    return text.translate(_CONTROLS)


def escaped(text: str) -> str:
    """Return `text` with escapes for unprintable characters, as a checkpoint's names may have."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def when(seconds: float) -> str:
    """Seconds since 1970 -> '2026-11-26 01:15', of this place."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def confirm(question: str, yes: bool) -> None:
    """Ask before something is deleted, unless --yes was given; "no" ends the command."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("There is no terminal to ask at; add --yes.")
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(1)


def note(text: str) -> None:
    """Write a dim line to stderr, for people at the terminal."""
    if sys.stderr.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    print(styled(text, "2", sys.stderr), file=sys.stderr)


def wrapped(text: str, width: int) -> str:
    """Break lines between words; what follows in a table's last column stays in it."""
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * _hanging(line, width),
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def _hanging(line: str, width: int) -> int:
    """Return the column where the second cell of a line begins, 0 if that leaves no room."""
    match = re.match(r"\S+(?: \S+)* {2,}", line)
    return match.end() if match is not None and match.end() <= width // 2 + 2 else 0
