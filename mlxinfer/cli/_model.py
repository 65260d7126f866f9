"""Model names on the command line to a loaded LLM, with a progress bar for a download."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hub
from ..backend import require_mlx
from ..memory import human_bytes

if TYPE_CHECKING:
    from ..llm import LLM

PROGRESS = "MLXINFER_PROGRESS"  # environment variable
LINE_S = 0.2  # between two lines of progress


def open_llm(name: str, **arguments: Any) -> "LLM":
    """Load a model, downloading it first if it is not here. Raises the errors of hub and LLM."""
    require_mlx()
    fetch(name)
    from ..llm import LLM

    return LLM(name, **arguments)


def fetch(name: str) -> Path:
    """hub.resolve() with a progress bar."""
    with progress_bar(name) as progress:
        return hub.resolve(name, progress=progress)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[hub.DownloadProgress], None]]:
    """Show a bar on stderr from the first byte on; nothing where stderr is no terminal.

    MLXINFER_PROGRESS=json writes lines of JSON instead.
    """
    if wants_progress_lines():
        write = progress_lines()
        yield lambda step: write("download", step.done_bytes, step.total_bytes)
        return
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(label, total=None, start=False)

    def show(step: hub.DownloadProgress) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=step.done_bytes, total=step.total_bytes)

    try:
        yield show
    finally:
        if bar.live.is_started:  # stopping one that never was leaves an empty line where TERM=dumb
            bar.stop()


def wants_progress_lines() -> bool:
    """Whether another program reads the progress (MLXINFER_PROGRESS=json)."""
    return os.environ.get(PROGRESS) == "json"


def progress_lines() -> Callable[[str, int, int], None]:
    """Return what writes {"step": …, "done": …, "total": …} to stderr, a few times a second."""
    lock, written = threading.Lock(), {"": 0.0}  # step -> when

    def write(step: str, done: int, total: int) -> None:
        with lock:
            now_s = time.monotonic()
            if now_s - written.get(step, 0.0) < LINE_S and done < total:
                return
            written[step] = now_s
            line = json.dumps({"step": step, "done": done, "total": total})
            print(line, file=sys.stderr, flush=True)

    return write


def has_chat_template(folder: Path | str) -> bool:
    """Whether the tokenizer comes with a template for conversations."""
    from ..text.tokenizer_files import read_tokenizer_files

    return bool(read_tokenizer_files(Path(folder)).templates)


def size_of(folder: Path) -> str:
    """Return the size of the files in `folder`, for people."""
    return human_bytes(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
