"""`bench convert`: what recipes cost in quality, and conversions in time and memory."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.errors import ModelNotFoundError
from mlxinfer.memory import parse_bytes
from tests.bench.convert_quality import Recipe, measure
from tests.bench.processes import ROOT, Ran, run_python

DISK_BYTES = 256 << 20
SHAPES = ("dense", "mixture of experts")


@dataclass(frozen=True, slots=True)
class Converted:
    """One checkpoint, by both."""

    label: str
    num_bytes: int
    fast: Ran  # mlxinfer, scales as mlx-lm
    searched: Ran  # mlxinfer, scales by squared error
    capped: Ran  # as fast, with --max-memory
    theirs: Ran | None


CAP = "300MB"
VARIANTS = (
    ("--fast",),
    ("--calibration", "none", "--check", "none"),
    ("--fast", "--max-memory", CAP),
)


def speeds(
    scratch: Path, num_bytes: int, tokenizer: Path, *, runs: int, peer: bool
) -> list[Converted]:
    """Dense and mixture of experts, to 4 bits in groups of 64.

    Converters take turns; the run with the least wall time counts.
    """
    found = []
    for label in SHAPES:
        source = scratch / label.replace(" ", "-")
        making = ["-m", "tests.bench.large_checkpoints", str(source), label]
        subprocess.run([sys.executable, *making, str(num_bytes), str(tokenizer)], check=True)
        total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        turns = [
            (
                *(_ours(source, scratch, *options) for options in VARIANTS),
                *([_theirs(source, scratch)] if peer else []),
            )
            for _ in range(runs)
        ]
        best = [min(column, key=lambda ran: ran.wall_s) for column in zip(*turns, strict=True)]
        fast, searched, capped, *theirs = best
        found.append(Converted(label, total, fast, searched, capped, theirs[0] if theirs else None))
        shutil.rmtree(source)
    return found


def disk_speeds(scratch: Path) -> tuple[float, float]:
    """Bytes a second written (and on the disk), and read (as often from memory)."""
    path, block = scratch / "disk", os.urandom(1 << 20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - started
    started = time.perf_counter()
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass
    read = time.perf_counter() - started
    path.unlink()
    return DISK_BYTES / written, DISK_BYTES / read


def _ours(source: Path, scratch: Path, *options: str) -> Ran:
    command = ["-m", "mlxinfer.cli", "convert", str(source), str(scratch / "out")]
    return _run([*command, "--bits", "4", *options], scratch / "out")


def _theirs(source: Path, scratch: Path) -> Ran:
    command = ["-m", "mlx_lm", "convert", "--hf-path", str(source), "-q", "--q-bits", "4"]
    out = scratch / "out"
    return _run([*command, "--q-group-size", "64", "--mlx-path", str(out)], out)


def _run(arguments: list[str], out: Path) -> Ran:
    """Run Python with these arguments; `out` is deleted afterwards."""
    ran = run_python(*arguments)
    shutil.rmtree(out)
    return ran


DEMO = ROOT / "tests" / "data" / "demo-bf16"


def run(
    *,
    model: Path | None = None,
    synthetic: str | None = None,
    runs: int = 1,
    small: bool = False,
    peer: bool = True,
) -> Report:
    """Measure.

    Args:
        model: a folder with unquantised weights; None: the demo model's, of a checkout.
        synthetic: instead of quality, speed: the size of random checkpoints, such as "3GB".
        runs: with `synthetic`: of each converter; the quickest counts.
        small: few recipes on few tokens.
        peer: also mlx-lm.

    Raises:
        ModelNotFoundError: no such folder.
    """
    if peer:
        require_peer()
    folder = DEMO if model is None else model
    check_model(folder)
    with TemporaryDirectory() as scratch:
        if synthetic is not None:
            size = parse_bytes(synthetic, param="synthetic")
            return _speed(speeds(Path(scratch), size, folder, runs=runs, peer=peer), Path(scratch))
        length, limit = (128, 2) if small else (1024, None)
        recipes, perplexity, num_tokens = measure(
            folder, Path(scratch), length=length, limit=limit, peer=peer, small=small
        )
    table = quality_table(recipes, perplexity, num_tokens, length)
    data = {"tokens": num_tokens, "source_perplexity": perplexity}
    return Report("convert", [table], {**data, "recipes": [asdict(r) for r in recipes]})


def check_model(folder: Path) -> None:
    """Raise ModelNotFoundError where there is none."""
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{folder} has no model; --model takes a folder of unquantised weights."
        )


def quality_table(recipes: list[Recipe], perplexity: float, num_tokens: int, length: int) -> Table:
    """Recipes by size."""
    rows = [
        [
            r.converter,
            r.label,
            f"{r.bits_per_weight:.3f}",
            f"{r.kl_mean:.5f}",
            f"{r.kl_p99:.4f}",
            f"{r.top1:.2%}",
            f"{r.perplexity:.4f}",
        ]
        for r in sorted(recipes, key=lambda r: (r.bits_per_weight, r.kl_mean))
    ]
    return Table(
        f"Recipes by size, {num_tokens:,} held-out tokens",
        ["converter", "recipe", "bits/weight", "KL mean", "KL p99", "same top-1", "perplexity"],
        rows,
        f"In windows of {length:,} tokens; perplexity of the source {perplexity:.4f}. KL in nats, "
        "from the source to the recipe. mlxinfer calibrates on its own text, which shares nothing "
        "with the held-out one; all are run by mlxinfer.",
    )


def _speed(found: list[Converted], scratch: Path) -> Report:
    written, read = disk_speeds(scratch)
    rows = []
    for each in found:
        for label, ours in (
            ("--fast", each.fast),
            (f"--fast --max-memory {CAP}", each.capped),
            ("searched scales", each.searched),
        ):
            rows.append(_speed_row(f"{each.label}, {label}", ours, each.theirs))
    table = Table(
        f"Whole processes, {found[0].num_bytes / 1e9:.2f} GB of bf16 to 4 bits",
        ["", "s", "mlx-lm s", "times as fast", "CPU s", "mlx-lm CPU s", "peak MB",
         "mlx-lm peak MB", "share of its peak"],
        rows,
        f"The disk beside it: {written / 1e6:,.0f} MB/s written, {read / 1e6:,.0f} MB/s read "
        "(from memory, where it is cached). --fast: scales as mlx-lm's, nothing compared.",
    )  # fmt: skip
    data = {
        "disk_bytes_per_s": {"written": written, "read": read},
        "conversions": [asdict(each) for each in found],
    }
    return Report("convert", [table], data)


def _speed_row(label: str, ours: Ran, theirs: Ran | None) -> list[str]:
    row = [label, f"{ours.wall_s:.1f}"]
    if theirs is None:
        return [*row, "-", "-", f"{ours.cpu_s:.1f}", "-", f"{ours.peak_bytes / 1e6:,.0f}", "-", "-"]
    return [
        *row,
        f"{theirs.wall_s:.1f}",
        ratio(theirs.wall_s, ours.wall_s),
        f"{ours.cpu_s:.1f}",
        f"{theirs.cpu_s:.1f}",
        f"{ours.peak_bytes / 1e6:,.0f}",
        f"{theirs.peak_bytes / 1e6:,.0f}",
        f"{ours.peak_bytes / theirs.peak_bytes:.2f}",
    ]
