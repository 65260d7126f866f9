"""Progress as lines of text, for people who read it in a file, and as bars on a terminal."""

import io
import os
import pty
import re
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from mlxinfer import progress
from mlxinfer.progress import rare_lines
from tests.seeds import seeded


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
        "write 50%, about 61 s left",
    ]


@pytest.mark.parametrize("resumed", [0, 400])
def test_the_time_left_of_a_step_is_of_its_own_pace(
    resumed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps take turns, at a steady pace each; an earlier run may have done a part of both."""
    draw = seeded()
    now_s, total = 0.0, 1000
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    show = rare_lines()
    pace_s = {"calibrate": draw.uniform(1, 9), "write": draw.uniform(1, 9)}  # of a thousandth
    done = dict.fromkeys(pace_s, resumed)
    for step in done:
        show(step, resumed, total)
    while min(done.values()) < total:
        step = draw.choice([step for step in done if done[step] < total])
        now_s += pace_s[step]
        done[step] += 1
        show(step, done[step], total)
        for line in capsys.readouterr().err.splitlines():
            if " left" in line:
                number, unit = re.findall(r"about (\d+) (s|min) left", line)[0]
                left_s = pace_s[step] * (total - done[step])
                within = 30.5 if unit == "min" else 0.5
                assert abs(int(number) * (60 if unit == "min" else 1) - left_s) <= within, line


def test_the_pace_of_a_bar_leaves_out_what_an_earlier_run_has_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(sys, "stderr", drawn)
    with progress.progress_bars(wanted=True) as show:
        show("download", 900, 1000)
        time.sleep(0.2)
        show("download", 901, 1000)
    rates = [float(rate) for rate in re.findall(r"([\d.]+)B/s", drawn.getvalue())]
    assert rates
    assert max(rates) <= 5.0, drawn.getvalue()


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
