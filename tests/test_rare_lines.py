"""Progress as lines of text, for people who read it in a file, and as bars on a terminal."""

import os
import pty
import sys
import termios
from types import SimpleNamespace

import pytest

from mlxinfer import progress
from mlxinfer.progress import rare_lines


def test_new_steps_and_each_minute_get_a_line_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([100.0, 100.5, 101.5, 150.0, 162.0, 163.5, 180.0, 223.5])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    show = rare_lines()
    for step, done in [
        ("read", 0),  # so short a step that nobody asks
        ("calibrate", 0),
        ("calibrate", 10),
        ("calibrate", 25),
        ("write", 1),
        ("write", 40),
        ("write", 50),
    ]:
        show(step, done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "calibrate 0%",
        "calibrate 25%, about 3 min left",
        "write 1%",
        "write 50%, about 60 s left",
    ]


def test_the_first_step_has_a_line_when_it_takes_longer_than_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([100.0, 100.1, 100.9, 101.1, 130.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    show = rare_lines()
    for done in (0, 20, 50, 60):
        show("open", done, 100)
    assert capsys.readouterr().err.splitlines() == ["open 50%, about 1 s left"]


def test_a_step_of_nothing_has_a_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    show = rare_lines()
    show("write", 0, 0)
    assert "min" not in capsys.readouterr().err


@pytest.mark.parametrize("size", [(0, 0), (40, 100)])
def test_a_terminal_has_bars_from_the_first_report_on(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that states no size, as a container's may be."""
    reads, writes = pty.openpty()
    termios.tcsetwinsize(writes, size)
    with open(writes, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress.progress_bars(unit="it", piped=True) as show:
            show("calibrate", 0, 10)
            drawn = os.read(reads, 1 << 16).decode()
    os.close(reads)
    assert "calibrate:   0%" in drawn
