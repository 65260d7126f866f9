"""Progress of what takes long (downloads, loading, batches, conversions), where it is watched.

A terminal gets rich's bars, a notebook tqdm's (widgets where ipywidgets is there, else text), and a
program that set MLXINFER_PROGRESS=json a line of JSON a few times a second. Elsewhere nothing is
written.
"""

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINES = "MLXINFER_PROGRESS"  # environment variable
LINE_S = 0.2  # between two lines of progress
PATIENCE_S = 0.5  # in which a model may load without a bar
Watch = Callable[[int, int], None]  # how far, of how much; called from any thread
StepWatch = Callable[[str, int, int], None]  # of a step by its name, such as "load org/name"
Unit = Literal["B", "answers", "it"]


def unwatched(*_: object) -> None:
    """A watch that shows nothing."""


@contextmanager
def progress_bars(*, unit: Unit = "B", wanted: bool | None = None) -> Iterator[StepWatch]:
    """A bar for each step that is reported, from the first report on.

    Args:
        unit: of what is counted.
        wanted: None: where stderr is a terminal, or in a notebook.
    """
    if wants_lines():
        yield progress_lines()
    elif not is_watched(wanted):
        yield unwatched
    elif sys.stderr.isatty() and not in_notebook():
        with _rich_bars(unit) as show:
            yield show
    else:
        with _tqdm_bars(unit) as show:
            yield show


@contextmanager
def progress_bar(label: str, *, unit: Unit = "B", wanted: bool | None = None) -> Iterator[Watch]:
    """`progress_bars` of one step."""
    with progress_bars(unit=unit, wanted=wanted) as show:
        yield lambda done, total: show(label, done, total)


def is_watched(wanted: bool | None) -> bool:
    """Whether progress is shown: as wanted, or (None) in a notebook and on a terminal."""
    return (in_notebook() or sys.stderr.isatty()) if wanted is None else wanted


def patient(show: StepWatch) -> StepWatch:
    """The same, but silent for PATIENCE_S after the first report, by when small models load."""
    reported: list[float] = []

    def show_later(step: str, done: int, total: int) -> None:
        reported.append(time.monotonic())
        if reported[-1] - reported[0] > PATIENCE_S:
            show(step, done, total)

    return show_later


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which renders HTML."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def wants_lines() -> bool:
    """Whether another program reads the progress (MLXINFER_PROGRESS=json)."""
    return os.environ.get(LINES) == "json"


def progress_lines() -> StepWatch:
    """Return what writes {"step": …, "done": …, "total": …} to stderr, a few times a second.

    The step is the first word of its name.
    """
    lock, written = threading.Lock(), {"": 0.0}  # step -> when

    def write(step: str, done: int, total: int) -> None:
        with lock:
            now_s = time.monotonic()
            if now_s - written.get(step, 0.0) < LINE_S and done < total:
                return
            written[step] = now_s
            line = json.dumps({"step": step.partition(" ")[0], "done": done, "total": total})
            print(line, file=sys.stderr, flush=True)

    return write


@contextmanager
def _rich_bars(unit: Unit) -> Iterator[StepWatch]:
    bars = _new_rich_bars(unit)
    tasks: dict[str, TaskID] = {}
    lock = threading.Lock()

    def show(step: str, done: int, total: int) -> None:
        with lock:
            if not bars.live.is_started:
                bars.start()
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total, completed=done)
            bars.update(tasks[step], completed=done, total=total)

    try:
        yield show
    finally:
        if bars.live.is_started:  # stopping one that never was leaves an empty line where TERM=dumb
            bars.stop()


def _new_rich_bars(unit: Unit) -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    whole = Column(no_wrap=True)
    counts: list[ProgressColumn] = [MofNCompleteColumn(table_column=whole)]
    if unit == "B":
        counts = [DownloadColumn(table_column=whole), TransferSpeedColumn(table_column=whole)]
    return Progress(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        BarColumn(bar_width=16),
        *counts,
        TimeRemainingColumn(compact=True, table_column=whole),
        console=Console(stderr=True),
        expand=True,
        transient=True,
    )


@contextmanager
def _tqdm_bars(unit: Unit) -> Iterator[StepWatch]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ipywidgets are missing: then the bar is text
        from tqdm.auto import tqdm
    bars: dict[str, Any] = {}
    lock = threading.Lock()

    def show(step: str, done: int, total: int) -> None:
        with lock:
            if step not in bars:
                bars[step] = tqdm(
                    desc=step,
                    total=total,
                    unit=unit,
                    unit_scale=unit == "B",
                    unit_divisor=1000,
                    leave=False,
                )
            bar = bars[step]
            bar.total = total
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
