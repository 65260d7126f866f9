"""Streaming markdown: what is finished is printed once, whatever the pieces it came in."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlxinfer.cli import _markdown
from mlxinfer.cli._markdown import MarkdownStream, PlainStream, split_finished
from mlxinfer.outputs import Delta, TextPart

PIECES = ["a", "word ", "\n", "\n\n", "```\n", "```", "~~~\n", "    x\n", "- item\n", "# Head\n"]


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one line", ""),
        ("one\n\n", ""),  # an indented line could still belong to it
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("- a\n\n  more of a\n\n- b", ""),  # a list is one block
        ("```\nx\n\ny\n", ""),
        ("```\nx\n\ny\n```\n\nz", "```\nx\n\ny\n```\n\n"),
        ("````\n```\n\ninside\n", ""),
        ("~~~\n```\n\ninside\n~~~\n\nz", "~~~\n```\n\ninside\n~~~\n\n"),
        ("```py\n``` x\n\ninside", ""),
        ("`a` and ```b```\n\nz", "`a` and ```b```\n\n"),
    ],
)
def test_a_block_is_finished_where_nothing_can_change_it(text: str, finished: str) -> None:
    assert split_finished(text) == (finished, text[len(finished) :])


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.data())
def test_pieces_do_not_matter(pieces: list[str], data: st.DataObject) -> None:
    """The finished part is a prefix of the text, and does not depend on the pieces."""
    text = "".join(pieces)
    committed, rest, position = "", "", 0
    while position < len(text):
        size = data.draw(st.integers(1, 5))
        finished, rest = split_finished(rest + text[position : position + size])
        committed += finished
        position += size
    assert committed + rest == text
    assert committed == split_finished(text)[0]


def terminal(height: int = 20) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=40, height=height, no_color=True)


def shown(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_every_block_is_printed_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_markdown, "FRAME_S", 1e9)  # no drafts: only what is final
    console = terminal()
    stream = MarkdownStream(console)
    for character in "# Title\n\nfirst *word*\n\n```\ncode\n\nmore\n```\n\nlast":
        stream.feed(character)
    stream.finish()
    text = shown(console)
    positions = [text.index(part) for part in ("Title", "first", "code", "more", "last")]
    assert positions == sorted(positions)
    for part in ("Title", "first", "code", "more", "last"):
        assert text.count(part) == 1


def test_the_open_block_is_drawn_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_markdown, "FRAME_S", 0.0)
    console = terminal()
    stream = MarkdownStream(console)
    stream.feed("hello ")
    stream.feed("world")
    assert shown(console).count("hello") == 2  # two drafts
    stream.finish()
    assert "\x1b[2K" in shown(console)  # erased
    assert shown(console).rstrip().endswith("hello world")


def test_a_block_taller_than_the_screen_shows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_markdown, "FRAME_S", 0.0)
    console = terminal(height=6)
    stream = MarkdownStream(console)
    stream.feed("```\n" + "".join(f"line{i}\n" for i in range(50)))
    assert "line49" in shown(console)
    assert "line10\n" not in shown(console)
    stream.finish()
    assert "line10" in shown(console)


def test_without_a_terminal_text_is_written_unchanged() -> None:
    file = io.StringIO()
    stream = PlainStream(file, None)
    for piece in ("# Ti", "tle\n\n", "*x*"):
        stream.feed(Delta(parts=[TextPart(piece)]))
    stream.finish()
    assert file.getvalue() == "# Title\n\n*x*\n"


LONG = r"""# A heading

Words of **several lengths** wrap between each other, and $\frac{a_1}{b_1} * c_2 * d$ stays so.

\[
x_1
- y_1
\]

1. a list whose first item is rather long and wraps
"""


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_break_between_words_and_formulas_stay_as_written(width: int) -> None:
    screen = io.StringIO()
    stream = MarkdownStream(
        Console(file=screen, width=width, force_terminal=True, color_system=None)
    )
    stream.feed(LONG)
    stream.finish()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line.rstrip() for line in shown.replace("\r", "\n").splitlines()]
    assert max(map(len, lines)) <= width
    assert "A heading" in lines  # on the left
    words = " ".join(lines).split()
    for word in re.sub(r"\*\*|# |1\. ", "", LONG).split():
        assert word in words
    assert [line for line in lines if line in ("x_1", "- y_1")][-2:] == ["x_1", "- y_1"]
