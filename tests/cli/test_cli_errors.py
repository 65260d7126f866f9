"""Errors become one line and an exit code, never a traceback."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from fake_llm import FakeLLM

from mlxinfer import __version__
from mlxinfer.cli._commands import cli
from mlxinfer.cli._options import FileOption
from tests.tables import table


def test_a_bug_is_named_and_said_to_be_one(fake: FakeLLM, outcome: Any) -> None:
    fake.fail_after, fake.error = 0, ZeroDivisionError("by zero")
    seen = outcome("run", "hi")
    assert seen.code == 1
    assert seen.err.startswith("error: unexpected ZeroDivisionError: by zero\nhint: this is a bug")
    assert "Traceback" not in seen.err


def test_a_traceback_on_request(
    fake: FakeLLM, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXINFER_TRACEBACK", "1")
    fake.fail_after, fake.error = 0, ZeroDivisionError("by zero")
    assert "Traceback (most recent call last)" in outcome("run", "hi").err


def test_a_server_that_is_not_there_is_named(outcome: Any) -> None:
    for command in (["run", "hi"], ["chat"]):
        seen = outcome(*command, "-m", "http://127.0.0.1:1/v1")
        assert seen.code == 1
        assert "No server answers at http://127.0.0.1:1" in seen.err


def test_version_and_help(outcome: Any) -> None:
    assert outcome("--version").out == f"mlxinfer, version {__version__}\n"
    seen = outcome("--help")
    assert seen.code == 0
    for name in ("run", "chat", "pull", "list", "show", "rm", "doctor"):
        assert f"\n  {name} " in seen.out
        assert outcome(name, "--help").code == 0


def test_a_group_without_a_command_shows_its_help(outcome: Any) -> None:
    for group in ((), ("config",), ("service",)):
        seen = outcome(*group)
        assert (seen.code, seen.out) == (2, "")
        assert seen.err == outcome(*group, "--help").out


def test_only_a_command_that_is_nearly_right_is_suggested(outcome: Any) -> None:
    assert "Did you mean" not in outcome("fly").err


def options_of(
    command: click.Command, path: str = "mlxinfer"
) -> Iterator[tuple[str, click.Option]]:
    """(command, option) of a command and all below it."""
    yield from ((path, param) for param in command.params if isinstance(param, click.Option))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options_of(below, f"{path} {name}")


def test_every_option_says_what_it_does() -> None:
    silent = [f"{path} {item.opts[0]}" for path, item in options_of(cli) if not item.help]
    assert silent == []


def test_serve_has_few_flags_and_the_others_are_documented() -> None:
    serve = cli.get_command(click.Context(cli), "serve")
    files = [file for file in serve.params if isinstance(file, FileOption)]
    assert len([file for file in serve.params if not getattr(file, "hidden", True)]) <= 36
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text[text.index("options have no flag") :]
    for file in files:
        assert f"`{file.opts[0].removeprefix('--')}`" in table


LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}'
ERRORS: list[list[Any]] = table(__file__, "errors.yml")


@pytest.mark.parametrize(
    ("status", "line", "words"),
    [pytest.param(status, line, words, id=line[:60]) for status, line, *words in ERRORS],
)
def test_an_error_is_said_in_words(
    fake: FakeLLM,
    outcome: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    line: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("in").write_text(LINE)
    Path("empty.toml").touch()
    os.mkfifo("pipe")
    fake.model_info.sees = True
    before = sorted(tmp_path.iterdir())
    seen = outcome(*shlex.split(line))
    assert (seen.code, seen.out) == (status, ""), seen.err
    assert [text for text in words if text not in seen.err] == [], seen.err
    assert not [text for text in ("Traceback", "Errno", "mlxinfer list") if text in seen.err]
    assert sorted(tmp_path.iterdir()) == before
    assert fake.asked == []
    if status == 2 and line.startswith("run"):
        assert "hint: `mlxinfer run --help`" in seen.err
        assert fake.opened == []


def test_without_a_home_it_is_the_root(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setenv("HOME", "/")  # so that it is put back afterwards
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    seen = outcome("cache", "info")
    assert (seen.code, seen.out) == (0, "/.cache/mlxinfer/kv: 0 B\n")
