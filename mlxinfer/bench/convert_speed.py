"""Whole processes of both converters over one large checkpoint: seconds and peak memory."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
DISK_BYTES = 256 << 20
SHAPES = ("dense", "mixture of experts")
LAUNCHER = """
import os, sys, time
started = time.perf_counter()
null = os.open(os.devnull, os.O_WRONLY)
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ,
                       file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, usage = os.wait4(child, 0)
print([time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss])
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """One process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


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
        making = ["-m", "mlxinfer.bench.convert_models", str(source), label]
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
    """Run Python with these arguments; `out` is deleted afterwards.

    A small process in between starts it: a child's peak counts from what its parent held.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wall_s, cpu_s, peak = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(out)
    return Ran(wall_s, cpu_s, peak * RSS_UNIT)
