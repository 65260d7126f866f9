"""Errors in notebooks: short, and without the variables of the library's frames."""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import MlxinferError
from ..progress import in_notebook

TRACEBACK = "MLXINFER_TRACEBACK"  # environment variable: tracebacks stay as they are
_LIBRARY = str(Path(__file__).parents[1])


def shorten_errors() -> None:
    """Let a notebook show errors of the library without the library's own frames.

    A notebook keeps the last traceback, and with it the variables of all frames in it: a model that
    is replaced after an error would stay in memory. So frames of the library are emptied after
    each cell.
    """
    if not in_notebook() or os.environ.get(TRACEBACK):
        return
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is not None:
        shell.set_custom_exc((MlxinferError, KeyboardInterrupt), _show_short)
        shell.events.register("post_run_cell", _empty_frames)


def _show_short(shell: Any, kind: type, error: BaseException, trace: Any, **_: Any) -> None:
    shorten(error)
    shell.showtraceback((kind, error, error.__traceback__))


def _empty_frames(result: Any) -> None:
    error = result.error_in_exec
    if error is not None:
        empty_frames(error)


def shorten(error: BaseException) -> None:
    """Cut the traceback of an error where it enters the library, after its frames were emptied."""
    empty_frames(error)
    error.__cause__ = error.__context__ = None
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        if _is_ours(entry.tb_next):
            entry.tb_next = None
        entry = entry.tb_next


def empty_frames(error: BaseException) -> None:
    """Delete the variables of the library's frames in the tracebacks of an error and its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        chained = waiting.pop()
        if chained is None or id(chained) in seen:
            continue
        seen.add(id(chained))
        entry = chained.__traceback__
        while entry is not None:
            if _is_ours(entry):
                with suppress(RuntimeError):  # a frame that still runs, on the engine's thread
                    entry.tb_frame.clear()
            entry = entry.tb_next
        waiting += [chained.__cause__, chained.__context__]


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_LIBRARY)
