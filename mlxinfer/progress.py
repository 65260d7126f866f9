"""Progress of what takes long (downloads, loading, batches, conversions), where it is watched.

A terminal and a notebook get tqdm's bars. Those of a notebook are text that changes in its place: a
saved notebook shows how they ended, where widgets would be drawn as they began. A program that set
MLXINFER_PROGRESS=json gets a line of JSON a few times a second. Elsewhere nothing is written,
except that what may take hours writes a line of text each minute.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

LINES = "MLXINFER_PROGRESS"  # environment variable
LINE_S = 0.2  # between two lines of progress
RARE_FIRST_S, RARE_S = 1.0, 60.0  # after any line: before a step's first one, and its others
PATIENCE_S = 0.5  # in which a model may load without a bar
COLUMNS, ROWS = 80, 24  # of a notebook, and of a terminal that states no size
Watch = Callable[[int, int], None]  # how far, of how much; called from any thread
StepWatch = Callable[[str, int, int], None]  # of a step by its name, such as "load org/name"
Unit = Literal["B", "answers", "it"]


def unwatched(*_: object) -> None:
    """A watch that shows nothing."""


@contextmanager
def progress_bars(
    *, unit: Unit = "B", wanted: bool | None = None, piped: bool = False
) -> Iterator[StepWatch]:
    """A bar for each step that is reported, from the first report on.

    Args:
        unit: of what is counted.
        wanted: None: where stderr is a terminal, or in a notebook.
        piped: elsewhere, lines of text a minute apart instead of nothing: for what takes hours.
    """
    if os.environ.get(LINES) == "json":  # another program reads the progress
        yield progress_lines()
    elif not is_watched(wanted):
        yield rare_lines() if piped else unwatched
    else:
        with _tqdm_bars(unit) as show:
            yield show


@contextmanager
def progress_bar(label: str, *, unit: Unit = "B", wanted: bool | None = None) -> Iterator[Watch]:
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
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


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


def rare_lines() -> StepWatch:
    """Return what writes how far each step is to stderr, for people who read it in a file.

    A step that goes on after the first second, and then each minute, gets a line such as
    "calibrate 40 %, about 3 min left". Steps may take turns: the time until a report is that of its
    step, and what an earlier run has done says nothing of the pace.
    """
    lock, written_s = threading.Lock(), time.monotonic()
    before_s = written_s  # the last report, of any step
    begun: dict[str, int] = {}  # how far a step was at its first report
    spent_s: dict[str, float] = {}
    lined: set[str] = set()

    def write(step: str, done: int, total: int) -> None:
        nonlocal written_s, before_s
        with lock:
            now_s = time.monotonic()
            spent_s[step] = spent_s[step] + now_s - before_s if step in begun else 0.0
            before_s, fresh = now_s, done - begun.setdefault(step, done)
            if now_s - written_s < (RARE_S if step in lined else RARE_FIRST_S):
                return
            lined.add(step)
            written_s = now_s
            line = f"{step} {done / max(total, 1):.0%}"
            if fresh > 0 and done < total:
                left_s = spent_s[step] * (total - done) / fresh
                left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
                line += f", about {left} left"
            print(line, file=sys.stderr, flush=True)

    return write


class _NotebookLine:
    encoding = "utf-8"  # bars are drawn with blocks

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str) -> None:
        from IPython.core.display_functions import display

        line = text.strip()
        if not line:
            return
        shown = {"text/plain": line}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def flush(self) -> None:
        """Nothing waits."""


def _place(notebook: bool) -> dict[str, Any]:
    """Where a bar of tqdm is drawn, and how large. Where a terminal has no size tqdm draws none."""
    if notebook:
        return {"file": _NotebookLine(), "position": 0, "ncols": COLUMNS}
    with suppress(OSError, ValueError):  # no terminal
        if not all(os.get_terminal_size(sys.stderr.fileno())):  # in a container, or a script
            return {"ncols": COLUMNS, "nrows": ROWS}
    return {"dynamic_ncols": True}


@contextmanager
def _tqdm_bars(unit: Unit) -> Iterator[StepWatch]:
    from tqdm import tqdm

    bars: dict[str, Any] = {}
    lock = threading.Lock()
    notebook = in_notebook()

    def show(step: str, done: int, total: int) -> None:
        with lock:
            if step not in bars:
                bars[step] = tqdm(
                    desc=step,
                    total=total,
                    initial=done,  # by an earlier run, perhaps: no part of the pace
                    unit=unit,
                    unit_scale=unit == "B" or total > 999_999,
                    unit_divisor=1000,
                    leave=notebook,
                    **_place(notebook),
                )
            bar = bars[step]
            bar.total = total
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
