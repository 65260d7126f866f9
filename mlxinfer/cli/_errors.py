"""Exceptions -> one line on stderr, a hint, an exit code. Knows no command."""

import os
import sys
import traceback
from collections.abc import Callable

import click

from ..errors import BackendMissingError, MlxinferError, ModelNotFoundError
from ._surroundings import INTERRUPTED

FAILED, USAGE = 1, 2
TRACEBACK = "MLXINFER_TRACEBACK"

_HINTS: dict[type[MlxinferError], str] = {
    ModelNotFoundError: "`mlxinfer list` shows the models on this disk",
    BackendMissingError: "`mlxinfer doctor` checks this machine",
}


def guarded(run: Callable[[], object]) -> int:
    """Call `run`, report what it raises, and return the exit code.

    The broad except is on purpose: it is the outermost boundary, and a traceback is no answer to
    somebody at a prompt. MLXINFER_TRACEBACK=1 brings it back.
    """
    try:
        code = run()
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):  # the latter: Ctrl-C twice
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        return report(error)
    return code if isinstance(code, int) else 0


def report(error: Exception) -> int:
    """Write `error: …` and a hint to stderr, and return the exit code that fits."""
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
        _write("error", str(error))
        return FAILED
    _write("error", f"unexpected {type(error).__name__}: {error}")
    _write("hint", f"this is a bug; set {TRACEBACK}=1 to see where it happened")
    return FAILED


def _write(label: str, message: str) -> None:
    print(f"{label}: {' '.join(message.split())}", file=sys.stderr)


def _reader_left() -> int:
    """`mlxinfer … | head` ended early: nobody reads, so nothing more is said."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    return FAILED
