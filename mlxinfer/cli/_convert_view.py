"""How a conversion is shown: its plan, how far it is, what came of it. Converts nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..hub import is_bundled
from ..memory import human_bytes
from ._output import human_count, table

Progress = Callable[[str, int, int], None]  # step, how far, of how much

if TYPE_CHECKING:
    from ..convert.plan import ConversionPlan
    from ..convert.report import ConversionReport


def plan_as_dict(
    plan: "ConversionPlan", *, peak_bytes: int, disk_bytes: int, measured: bool
) -> dict[str, Any]:
    """For --dry-run --json; `measured`: formats will follow from measuring.

    Tensors are in the order in which a model uses them, not that of the files.
    """
    return {
        "recipe": plan.recipe.name,
        "formats_follow_from_measuring": measured,
        "num_weights": plan.num_weights,
        "num_bytes": plan.num_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "peak_memory_bytes": peak_bytes,
        "disk_bytes": disk_bytes,
        "shards": [name for name, _ in plan.shards()],
        "tensors": [
            {
                "name": tensor.output.name,
                "shape": list(tensor.output.shape),
                "stored": tensor.output.stored,
                "format": tensor.format,
                "kept": tensor.packed,
                "num_bytes": tensor.num_bytes,
            }
            for tensor in sorted(plan.tensors, key=lambda t: model_order(t.output.path))
        ],
    }


def model_order(path: str) -> tuple[int, list[tuple[int, str]]]:
    """Embeddings, layers by number, what follows them, the output projection."""
    if path.endswith("embed_tokens"):
        stage = 0
    elif path.endswith("lm_head"):
        stage = 3
    else:
        stage = 1 if ".layers." in path else 2
    return stage, [(int(p), "") if p.isdigit() else (0, p) for p in path.split(".")]


def show_plan(plan: dict[str, Any]) -> None:
    """The same for people; tensors of one kind and format in one line."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for tensor in plan["tensors"]:
        kind = ".".join(part for part in tensor["name"].split(".") if not part.isdigit())
        shape = "x".join(map(str, tensor["shape"]))
        how = tensor["format"] + (" (kept)" if tensor["kept"] else "")
        groups.setdefault((kind, shape, tensor["stored"], how), []).append(tensor["num_bytes"])
    rows = [[*key, str(len(sizes)), human_bytes(sum(sizes))] for key, sizes in groups.items()]
    click.echo(table(rows, header=["tensor", "shape", "source", "format", "count", "bytes"]))
    click.echo(
        f"\n{human_count(plan['num_weights'])} weights, {human_bytes(plan['num_bytes'])} in "
        f"{_files(len(plan['shards']))}, {plan['bits_per_weight']:.3f} bits per weight\n"
        f"peak memory about {human_bytes(plan['peak_memory_bytes'])}, "
        f"disk {human_bytes(plan['disk_bytes'])}"
    )
    if plan["formats_follow_from_measuring"]:
        click.echo(
            f"Formats and sizes above are those of {plan['recipe']}; what meets the target follows "
            "from measuring."
        )


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def show_report(report: "ConversionReport", out: str) -> None:
    """A few lines."""
    click.echo(
        f"{out}: {human_bytes(report.num_bytes)}, {report.bits_per_weight:.3f} bits per weight; "
        + ", ".join(f"{count} {status}" for status, count in report.counts.items())
    )
    worst = report.worst
    if worst is not None and worst["relative"] > 0:
        click.echo(f"largest relative error {worst['relative']:.4f}, {worst['name']}")
    for check in report.logits:
        click.echo(
            f"in contexts of {check.context} tokens: KL divergence {check.kl_mean:.5f} (limit "
            f"{check.max_kl:g}), same top-1 {check.top1:.2%}, perplexity {check.perplexity:.3f} "
            f"(source {check.source_perplexity:.3f})"
        )
    for line in report.notes:
        click.echo(line)
    if report.passed and any(Path(out).glob("tokenizer.*")):
        name = f"./{out}" if is_bundled(str(out)) else out  # the bundled one comes first
        click.echo(f'try it: mlxinfer run -m {name} "Hello"')


class Downloads:
    """Bytes from the hub, counted before anybody watches."""

    def __init__(self) -> None:
        self._done = self._total = 0
        self._progress: Progress | None = None

    def add(self, count: int) -> None:
        """`count` bytes more, or fewer where some turned out useless."""
        self._done += count
        if self._progress is not None:
            self._progress("download", self._done, max(self._total, self._done))

    def watch(self, progress: Progress, total: int) -> None:
        """Tell `progress` from now on."""
        self._progress, self._total = progress, total


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """One bar for each step, with its rate and the time left; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total, completed=done, rate="")
            task = tasks[step]
            speed = bars.tasks[bars.task_ids.index(task)].speed
            rate = f"{human_count(speed)} weights/s" if speed and step == "write" else ""
            bars.update(task, completed=done, rate=rate)

        yield show
