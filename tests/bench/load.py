"""`bench load`: how fast weights of a cached file are in their place, beside reading them at all.

Every side is a process of its own, so that all memory is new, and the sides take turns. The clock
stops while everything is held: giving memory back is no part of a load. `read` is plain parallel
preadv of whole files into as much new memory, in pages as an allocator gets them from the system:
the limit, since whatever holds the weights has to fault that memory in. (Numpy asks for huge pages,
which MLX's allocator does not, and which macOS has not.) `mlxinfer` loads what a Mac would: MLX's
CPU backend needs dense experts of 16 bits in 32, which is left out. Reading from the system's
cache takes all cores' time, reading from a disk little: so one of a stated rate can be simulated.
`python -m tests.bench.load SIDE FOLDER RATE` is one such process.
"""

import gc
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from mlxinfer import hub
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import MlxinferError
from mlxinfer.memory import parse_bytes

DTYPE = "bfloat16"  # as it is stored: nothing is converted
THREADS, CHUNK_BYTES = 8, 4 << 20
SMALL = 150_000_000  # bytes

Work = Callable[[], tuple[object, int]]  # returns what it has loaded, and the peak in bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one load.

    Attributes:
        read_bytes: that the process asked of files (Linux); 0: not known.
        peak_bytes: of MLX's memory, or of what was read to.
    """

    wall_s: float
    cpu_s: float
    read_bytes: int
    peak_bytes: int


def read(folder: Path) -> Work:
    """All bytes of the files, several reads at once."""

    def work() -> tuple[object, int]:
        held, reads, total = [], [], 0
        for path in _files(folder):
            size, fd = path.stat().st_size, os.open(path, os.O_RDONLY)
            held.append(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            view = memoryview(held[-1])
            starts = range(0, size, CHUNK_BYTES)
            reads += [(fd, view[at : at + CHUNK_BYTES], at) for at in starts]
            total += size
        with ThreadPoolExecutor(THREADS) as pool:
            counts = pool.map(lambda one: os.preadv(one[0], [one[1]], one[2]), reads)
            assert sum(counts) == total
        return held, total

    return work


def ours(folder: Path) -> Work:
    """mlxinfer's model as a Mac has it. It cannot run here where it has experts of 16 bits."""
    import mlx.core as mx

    from mlxinfer.models import load
    from mlxinfer.models.config import load_config

    load_config(folder)  # what that imports is there before the clock runs

    def work() -> tuple[object, int]:
        with patch.object(mx.metal, "is_available", lambda: True):
            return load(folder, dtype=DTYPE), mx.get_peak_memory()

    return work


def theirs(folder: Path) -> Work:
    """mlx-lm's model, with all parameters evaluated."""
    import importlib

    import mlx.core as mx
    from mlx_lm.utils import load_model

    for name in ("qwen3", "qwen3_moe"):
        importlib.import_module(f"mlx_lm.models.{name}")

    def work() -> tuple[object, int]:
        model, _ = load_model(folder, lazy=True)
        mx.eval(model.parameters())
        return model, mx.get_peak_memory()

    return work


SIDES = {"read": read, "mlxinfer": ours, "mlx-lm": theirs}


def simulate_disk(rate: float) -> None:
    """Let `os.preadv` take as long as a disk of `rate` GB/s would, one read after another."""
    lock, free_at, plain = threading.Lock(), 0.0, os.preadv

    def slow(fd: int, views: Sequence[memoryview], start: int) -> int:
        nonlocal free_at
        began = time.monotonic()
        count = plain(fd, views, start)
        with lock:
            free_at = ready = max(free_at, began) + count / (rate * 1e9)
        time.sleep(max(ready - time.monotonic(), 0.0))
        return count

    os.preadv = slow  # type: ignore[assignment]  # no flags are used


def measure(side: str, folder: Path) -> Cost:
    """One load in this process, which has made none."""
    work = SIDES[side](folder)
    read_before, cpu_before, began = _read_bytes(), time.process_time(), time.perf_counter()
    held, peak = work()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    read_bytes = _read_bytes() - read_before
    del held
    return Cost(wall_s, cpu_s, read_bytes, peak)


def _read_bytes() -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(counters.read_text().split()[1])  # rchar: from the cache of the system as well


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def apart(side: str, folder: Path, disk: float | None = None) -> Cost:
    """The same in a process of its own, from the system's cache or a simulated disk (GB/s)."""
    command = [sys.executable, "-m", "tests.bench.load", side, str(folder), str(disk or "")]
    quiet = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads spin after its import
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    if done.returncode:
        raise MlxinferError(f"{side} failed: {done.stderr[-600:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _write(folder: Path, kind: str, num_bytes: int) -> dict[str, Path]:
    """A random checkpoint in shards, at 16 bits and converted to 4."""
    demo = hub.resolve("demo")
    made = {"16 bits": folder / kind, "4 bits": folder / f"{kind}-4"}
    for arguments in (
        ["tests.bench.large_checkpoints", str(made["16 bits"]), kind, str(num_bytes), str(demo)],
        [
            *("mlxinfer.cli", "convert", str(made["16 bits"]), str(made["4 bits"])),
            *("--fast", "--shard-size", str(max(num_bytes // 8, 1_000_000))),
        ],
    ):
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MlxinferError(f"{' '.join(command)} failed: {done.stderr[-600:]}")
    return made


def run(
    *,
    size: str = "1GB",
    runs: int = 3,
    small: bool,
    peer: bool,
    cpu_time: bool = False,
    disk: float | None = None,
) -> Report:
    """Loads of a dense model and of a mixture of experts, at 16 and at 4 bits."""
    peer = peer and disk is None  # its reads are not Python's, and cannot be slowed down
    if peer:
        require_peer()
    num_bytes = SMALL if small else parse_bytes(size)
    sides = [side for side in SIDES if peer or side != "mlx-lm"]
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        for kind in ("dense", "moe"):
            for label, folder in _write(Path(temporary), kind, num_bytes).items():
                stored = sum(path.stat().st_size for path in _files(folder))
                found: dict[str, list[Cost]] = {side: [] for side in sides}
                for _ in range(1 if small else runs):
                    for side in sides:
                        found[side].append(apart(side, folder, disk))
                rows += _rows(f"{kind}, {label}", stored, found, cpu_time)
                data += [
                    {"model": f"{kind}, {label}", "side": side, "stored": stored, **asdict(cost)}
                    for side, costs in found.items()
                    for cost in costs
                ]
    time_of = "CPU" if cpu_time else "wall"
    where = "cached files" if disk is None else f"a simulated disk of {disk:g} GB/s"
    table = Table(
        f"Loading the weights of {where}",
        ["model", "side", "GB/s", "of reading", "bytes read", "peak memory"],
        rows,
        f"The quickest of each by {time_of} time; bytes and memory in parts of what is stored.",
    )
    return Report("load", [table], {"loads": data})


def _rows(
    model: str, stored: int, found: dict[str, list[Cost]], cpu_time: bool
) -> Sequence[list[str]]:
    def seconds(costs: list[Cost]) -> float:
        return min(cost.cpu_s if cpu_time else cost.wall_s for cost in costs)

    limit_s = seconds(found["read"])
    return [
        [
            *(model, side, f"{stored / seconds(costs) / 1e9:.2f}"),
            f"{limit_s / seconds(costs):.2f}",
            f"{max(cost.read_bytes for cost in costs) / stored:.3f}",
            f"{max(cost.peak_bytes for cost in costs) / stored:.3f}",
        ]
        for side, costs in found.items()
    ]


if __name__ == "__main__":
    gc.disable()
    if sys.argv[3]:
        simulate_disk(float(sys.argv[3]))
    print(json.dumps(asdict(measure(sys.argv[1], Path(sys.argv[2])))))
