"""Sizes, tables, colours: how commands write."""

import io

import pytest

from mlxinfer.cli._output import colours, human_count, printable, styled
from mlxinfer.memory import human_bytes


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sizes_and_counts_are_told_in_the_nearest_unit() -> None:
    for count, text in {
        **{0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_900: "1.0 MB", 1_536_000: "1.5 MB"},
        **{262_264: "262 kB", 4_200_000_000: "4.2 GB", 5e15: "5000 TB"},
    }.items():
        assert human_bytes(count) == text
    for count, text in {
        7_241_732_096: "7.2 B",
        596_049_920: "596 M",
        28_800: "28.8 k",
        7: "7",
    }.items():
        assert human_count(count) == text


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not colours(io.StringIO())
    assert styled("x", "31", Screen()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "31", Screen()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not colours(Screen())


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\r\x9bb\tc\n\x7f") == "a[2Jb\tc\n"
