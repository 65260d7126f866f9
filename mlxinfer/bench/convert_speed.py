"""Whole processes of both converters over one large checkpoint: seconds and peak memory."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .convert_models import DENSE, MOE, write_large

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
DISK_BYTES = 256 << 20
SHAPES = {"dense": DENSE, "mixture of experts": MOE}


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


def speeds(scratch: Path, num_bytes: int, tokenizer: Path, *, peer: bool) -> list[Converted]:
    """Dense and mixture of experts, to 4 bits in groups of 64."""
    found = []
    for label, config in SHAPES.items():
        source = scratch / label.replace(" ", "-")
        total = write_large(source, config, num_bytes, tokenizer)
        found.append(
            Converted(
                label,
                total,
                _ours(source, scratch, "--fast"),
                _ours(source, scratch, "--calibration", "none", "--check", "none"),
                _ours(source, scratch, "--fast", "--max-memory", CAP),
                _theirs(source, scratch) if peer else None,
            )
        )
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
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - started
    assert process.returncode == 0, said[-2000:]
    shutil.rmtree(out)
    return Ran(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT)
