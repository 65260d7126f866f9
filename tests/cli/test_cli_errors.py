"""Errors become one line and an exit code, never a traceback."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from fake_llm import FakeLLM

from mlxinfer import __version__
from mlxinfer.cli._commands import cli
from mlxinfer.cli._options import FileOption


def test_a_bug_is_named_and_said_to_be_one(fake: FakeLLM, outcome: Any) -> None:
    fake.fail_after, fake.error = 0, ZeroDivisionError("by zero")
    seen = outcome("run", "hi")
    assert seen.code == 1
    assert seen.err.startswith("error: unexpected ZeroDivisionError: by zero\nhint: this is a bug")
    assert "Traceback" not in seen.err


def test_the_traceback_can_be_had(
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


def test_a_command_that_is_nearly_right_is_suggested(outcome: Any) -> None:
    assert "Did you mean 'run'?" in outcome("rnu").err
    assert "'rm' or 'run'?" in outcome("rum").err
    seen = outcome("fly")
    assert (seen.code, seen.out) == (2, "")
    assert "No such command 'fly'" in seen.err
    assert "Did you mean" not in seen.err


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--allowed-origin", "chat.example"), "--allowed-origin"),
        (("--ttl", "soon"), "30m"),
        (("--max-memory", "8XB"), "8GB"),
        (("--max-memory", "1KB"), "--max-memory"),
        (("--kv-bits", "5"), "8/4"),
        (("--disk-cache", "much"), "8GB"),
        (("--api-key", ""), "API key"),
        (("--host", "0.0.0.0"), "--insecure"),
        (("--drain", "3"), "set drain under [serve] in the config file, or MLXINFER_SERVE_DRAIN_S"),
        (("--log-level", "loud"), "warning"),
    ],
)
def test_a_value_that_serve_cannot_take_is_wrong_usage(
    outcome: Any, tmp_path: Path, arguments: tuple[str, str], named: str
) -> None:
    empty = tmp_path / "empty.toml"
    empty.touch()
    seen = outcome("serve", "--config", str(empty), "--port", "0", *arguments)
    assert seen.code == 2
    assert named in seen.err
    assert "Traceback" not in seen.err


def test_serve_has_few_flags_and_the_others_are_documented() -> None:
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    files = [file for file in serve.params if isinstance(file, FileOption)]
    assert len([file for file in serve.params if not getattr(file, "hidden", True)]) <= 36
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text[text.index("options have no flag") :]
    for file in files:
        assert f"`{file.opts[0].removeprefix('--')}`" in table


LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}'


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("fuse", "demo", "no_adapter", "out"), 1, "There is no folder 'no_adapter'; an adapter"),
        (("batch", "folder", "out"), 2, "'folder' is a directory"),
        (("batch", "pipe", "out"), 2, "pipe is no file; it is read twice"),
        (("batch", "in", "pipe"), 1, "pipe is no file"),
        (("batch", "in", "no_folder/out"), 1, "name one in a folder that is there"),
        (("batch", "in", "o" * 300), 1, "oo: File name too long"),
    ],
)
def test_what_is_wrong_with_a_path_is_said_in_words(
    outcome: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("in").write_text(LINE)
    os.mkfifo("pipe")
    seen = outcome(*arguments)
    assert (seen.code, words in seen.err) == (code, True), seen.err
    assert "Errno" not in seen.err
    assert "mlxinfer list" not in seen.err


def test_a_user_without_a_home_lives_in_the_root(
    outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setenv("HOME", "/")  # so that it is put back afterwards
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    seen = outcome("cache", "info")
    assert (seen.code, seen.out) == (0, "/.cache/mlxinfer/kv: 0 B\n")
