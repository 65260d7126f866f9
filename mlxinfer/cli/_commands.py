"""Finds commands, runs one, and reports its failure in one line on stderr.

Modules of commands import slow ones (mlx, rich, the hub) inside of their functions, so that
`mlxinfer --help` is quick.
"""

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

import click

from .. import __version__
from ..errors import BackendMissingError, MlxinferError, ModelNotFoundError
from ._process import INTERRUPTED, ending_at_interrupts

COMMANDS = {  # in the order of --help -> the module that has it, and its name there
    "run": "run.command",
    "chat": "chat.command",
    "serve": "serve.command",
    "batch": "batch.command",
    "app": "_commands.app",
    "ps": "running.ps",
    "load": "running.load",
    "unload": "running.unload",
    "suggest": "disk.suggest",
    "pull": "disk.pull",
    "list": "disk.list_command",
    "show": "show.command",
    "rm": "disk.rm",
    "convert": "convert.command",
    "fuse": "convert.fuse",
    "launch": "running.launch",
    "why": "running.why",
    "history": "history.command",
    "session": "session.command",
    "config": "config.command",
    "service": "service.command",
    "cache": "disk.cache",
    "doctor": "doctor.command",
    "bench": "bench.command",
    "completion": "_commands.completion",
}
FAILED, USAGE = 1, 2
TRACEBACK = "MLXINFER_TRACEBACK"
_HINTS: dict[type[MlxinferError], str] = {
    ModelNotFoundError: "`mlxinfer list` shows the models on this disk",
    BackendMissingError: "`mlxinfer doctor` checks this machine",
}


class CommandTable(click.Group):
    """A group with the commands of COMMANDS, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(".")
        with ending_at_interrupts():
            command = getattr(import_module(f".{module}", __package__), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = get_close_matches(args[0], COMMANDS)
        if near and args[0] not in COMMANDS:
            meant = " or ".join([repr(name) for name in near])
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)


SHOWN = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=CommandTable, context_settings=SHOWN)
@click.version_option(__version__, prog_name="mlxinfer")
def cli() -> None:
    """LLM inference for Apple silicon.

    \b
    mlxinfer run "Why is the sky blue?"       one answer from the bundled demo model
    mlxinfer chat -m mlx-community/Qwen3-4B-4bit
    mlxinfer COMMAND --help                   what a command takes
    """


APP_PACKAGES = ("toga", "toga_cocoa", "toga_qt", "rubicon", "PySide6", "qasync")


@click.command()
@click.option("--background", is_flag=True, help="Open no window at the start.")
def app(background: bool) -> None:
    """Open the menubar app, or show its window if it runs already.

    The app shows what a server does, and can start one. A hotkey opens the chat.
    """
    from ..app import main

    try:
        main(background=background)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in APP_PACKAGES:
            raise
        raise click.ClickException(
            'The menubar app needs Toga: pip install -e ".[app]" in a checkout of mlxinfer'
        ) from error


@click.command()
@click.argument("shell", type=click.Choice(["zsh", "bash", "fish"]))
def completion(shell: str) -> None:
    """Print a script that lets SHELL complete commands.

    \b
    mlxinfer completion zsh > "${fpath[1]}/_mlxinfer"
    mlxinfer completion bash > ~/.local/share/bash-completion/completions/mlxinfer
    mlxinfer completion fish > ~/.config/fish/completions/mlxinfer.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "mlxinfer", "_MLXINFER_COMPLETE")  # the variable that asks for words
    click.echo(kind.source_template % script.source_vars())


def guarded(run: Callable[[], object]) -> int:
    """Call `run`, report its exception, and return the exit code.

    The broad except is on purpose: this is the outermost boundary, and a user at a prompt is not
    helped by a traceback. MLXINFER_TRACEBACK=1 shows it.
    """
    try:
        code = run()
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):  # the latter: Ctrl-C twice
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:  # the end of the program: a message in place of a traceback
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        return report(error)
    return code if isinstance(code, int) else 0


def report(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        if context is not None and error.message == context.get_help():
            click.echo(error.message, err=True)  # a group without a command: no mistake to name
            return error.exit_code
        _write("error", error.format_message())
        if context is not None:
            _write("hint", f"`{context.command_path} --help` shows what it takes")
        return error.exit_code
    if isinstance(error, MlxinferError):
        _write("error", str(error))
        if hint := _HINTS.get(type(error)):
            _write("hint", hint)
        return FAILED
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        _write("error", where + (error.strerror or str(error)))
        return FAILED
    _write("error", f"unexpected {type(error).__name__}: {error}")
    _write("hint", f"this is a bug; set {TRACEBACK}=1 to see where it happened")
    return FAILED


def _write(label: str, message: str) -> None:
    line = f"{label}: {' '.join(message.split())}"
    if sys.stderr.isatty():
        from ._output import wrapped

        line = wrapped(line, shutil.get_terminal_size().columns)
    print(line, file=sys.stderr)


def _reader_left() -> int:
    """Handle a closed stdout (`mlxinfer … | head`) without further output."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    return FAILED
