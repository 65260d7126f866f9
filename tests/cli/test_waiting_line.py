"""While an answer is waited for and drawn: the line that says so, and the echo of the terminal."""

import os
import pty
import sys
import termios
from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from mlxinfer.cli import _markdown
from mlxinfer.cli._markdown import WaitingLine, until_first_word
from mlxinfer.cli.chat import silent_interrupts
from mlxinfer.outputs import Delta
from tests.waiting import wait_until


def screen(*, terminal: bool = True) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=80)


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_it_names_turn_and_prompt_until_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_markdown, "PATIENCE_S", 0.0)
    console = screen()
    line = WaitingLine(console)

    def deltas() -> Iterator[Delta]:
        wait_until(lambda: "waiting for its turn" in text_of(console))
        line.read(2000, 8000)
        wait_until(lambda: "reading 8,000 tokens: 25 %" in text_of(console))
        yield Delta()
        shown = len(text_of(console))
        yield Delta()
        assert len(text_of(console)) == shown

    with until_first_word(line, deltas()) as watched:
        assert len(list(watched)) == 2
    assert text_of(console).endswith("\x1b[2K")


def test_it_tells_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([10.0, 14.0])
    monkeypatch.setattr(_markdown, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    line = WaitingLine(screen())
    line.read(1000, 9000)
    line.read(3000, 9000)
    assert line._text == "reading 9,000 tokens: 33 %, 12 s left"


def test_it_writes_nothing_where_an_answer_comes_soon_or_there_is_no_terminal() -> None:
    for console in (screen(), screen(terminal=False)):
        with until_first_word(WaitingLine(console), iter([Delta()])) as watched:
            list(watched)
        assert text_of(console) == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    master, slave = pty.openpty()
    with os.fdopen(slave) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield slave
    os.close(master)


def echoes_controls(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHOCTL)


def test_controls_are_silent_only_inside(terminal: int) -> None:
    assert echoes_controls(terminal)
    with silent_interrupts():
        assert not echoes_controls(terminal)
    assert echoes_controls(terminal)


def interrupted() -> None:
    with silent_interrupts():
        raise KeyboardInterrupt


def test_an_interrupt_puts_them_back(terminal: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert echoes_controls(terminal)
