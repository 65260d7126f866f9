"""The echo of the terminal while an answer is drawn, on a real pseudo-terminal."""

import os
import pty
import sys
import termios
from collections.abc import Iterator

import pytest

from mlxinfer.cli.chat import silent_interrupts


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
