"""Sizes, tables, colours: how commands write."""

import io
import sys

import pytest

from mlxinfer.cli._output import colours, cut, human_count, printable, styled, table
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


def test_lines_of_tables_have_room_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    header = ("NAME", "SIZE", "STATE")
    rows = [("org/" + "n" * 30, "4.5 MB", "ready, lm studio"), ("demo", "1 B", "bundled")]
    whole = table(rows, header=header)
    assert max(map(len, whole.splitlines())) == 60  # a pipe gets all
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width, shown in {
        60: whole.splitlines()[1],
        52: "…nnnnnnnnnnnnnnnnnnnnnnnnn  4.5 MB  ready, lm studio",
        40: "…nnnnnnnnnnnnnnnnnnnnnnn  4.5 MB  …",
    }.items():
        monkeypatch.setenv("COLUMNS", str(width))
        assert table(rows, header=header).splitlines()[1] == shown
    monkeypatch.setenv("COLUMNS", "16")
    assert table([("about", "some words here")]) == "about  some\n       words\n       here"


def test_what_is_cut_keeps_whole_words_and_the_ends_of_names() -> None:
    for text, shown in {
        "mlx-community/Qwen3-4B": "…Qwen3-4B",
        "model.layers.0.mlp.down": "…0.mlp.down",
        "Summarise the report of today": "Summarise the…",
        "Donaudampfschifffahrt": "…mpfschifffahrt",
    }.items():
        assert cut(text, 15) == shown
