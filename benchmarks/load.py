"""`bench load`: how fast weights of a cached file are in their place, beside reading them at all.

Every side is a process of its own, so that all memory is new, and the sides take turns. The clock
stops while everything is held: giving memory back is no part of a load. `read` is plain parallel
preadv of whole files into as much new memory, in pages as an allocator gets them from the system:
the limit, since whatever holds the weights has to fault that memory in. (Numpy asks for huge pages,
which MLX's allocator does not, and which macOS has not.) `mlxinfer` loads what a Mac would: MLX's
CPU backend needs dense experts of 16 bits in 32, which is left out. Reading from the system's
cache takes all cores' time, reading from a disk little: so one of a stated rate can be simulated.
`python -m benchmarks.load SIDE FOLDER RATE` is one such process.
"""

import gc
import json
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.processes import run_python
from benchmarks.tables import Figures
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.memory import parse_bytes

DTYPE = "bfloat16"  # as it is stored: nothing is converted
THREADS, CHUNK_BYTES = 8, 4 << 20
SMALL = 150_000_000  # bytes

Work = Callable[[], tuple[object, int]]  # returns what it has loaded, and the peak in bytes


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


@contextmanager
def simulated_disk(rate: float | None) -> Iterator[None]:
    """Let `os.preadv` take as long as a disk of `rate` GB/s that answers in 0.1 ms would.

    One read comes after another; None: they come from where they do.
    """
    lock, free_at, plain = threading.Lock(), 0.0, os.preadv

    def slow(fd: int, views: Sequence[memoryview], start: int) -> int:
        nonlocal free_at
        began = time.monotonic()
        count = plain(fd, views, start)
        with lock:
            free_at = max(free_at, began) + count / (rate * 1e9 if rate else math.inf)
            ready = max(free_at, began + 1e-4)
        time.sleep(max(ready - time.monotonic(), 0.0))
        return count

    with patch.object(os, "preadv", slow if rate else plain):  # no flags are used
        yield


def measure(side: str, folder: Path) -> Figures:
    """One load in this process, which has made none.

    `read_bytes` is what the process asked of files (Linux; 0: not known), `peak_bytes` that of
    MLX's memory, or of what was read to.
    """
    work = SIDES[side](folder)
    read_before, cpu_before, began = _read_bytes(), time.process_time(), time.perf_counter()
    held, peak = work()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    read_bytes = _read_bytes() - read_before
    del held
    return {"wall_s": wall_s, "cpu_s": cpu_s, "read_bytes": read_bytes, "peak_bytes": peak}


def _read_bytes() -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(counters.read_text().split()[1])  # rchar: from the cache of the system as well


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def apart(side: str, folder: Path, disk: float | None) -> Figures:
    """The same in a process of its own, from the system's cache or a simulated disk (GB/s)."""
    quiet = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's threads spin after its import
    ran = run_python("-m", "benchmarks.load", side, str(folder), str(disk or ""), **quiet)
    content: Figures = json.loads(ran.lines[-1])
    return content


def _write(folder: Path, kind: str, num_bytes: int) -> dict[str, Path]:
    """A random checkpoint in shards, at 16 bits and converted to 4."""
    made, small = folder / kind, folder / f"{kind}-4"
    run_python("-m", "benchmarks.checkpoints", str(made), kind, str(num_bytes), "demo")
    shard = str(max(num_bytes // 8, 1_000_000))
    convert = ["mlxinfer.cli", "convert", str(made), str(small), "--fast", "--shard-size", shard]
    run_python("-m", *convert)
    return {"16 bits": made, "4 bits": small}


def run(
    *, size: str, runs: int, small: bool, peer: bool, cpu_time: bool, disk: float | None
) -> Report:
    """Loads of a dense model and of a mixture of experts, at 16 and at 4 bits."""
    peer = peer and disk is None  # its reads are not Python's, and cannot be slowed down
    if peer:
        require_peer()
    num_bytes, runs = (SMALL, 1) if small else (parse_bytes(size), runs)
    sides = [side for side in SIDES if peer or side != "mlx-lm"]
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        for kind in ("dense", "moe"):
            for label, folder in _write(Path(temporary), kind, num_bytes).items():
                model, stored = f"{kind}, {label}", sum(p.stat().st_size for p in _files(folder))
                turns = [{side: apart(side, folder, disk) for side in sides} for _ in range(runs)]
                by_name = {side: [turn[side] for turn in turns] for side in sides}
                rows += _rows(model, stored, by_name, "cpu_s" if cpu_time else "wall_s")
                about = {"model": model, "stored": stored}
                data += [
                    {**about, "side": s, **cost} for s, value in by_name.items() for cost in value
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
    model: str, stored: int, figures: dict[str, list[Figures]], clock: str
) -> Iterator[list[str]]:
    quickest = {side: min(cost[clock] for cost in costs) for side, costs in figures.items()}
    for side, costs in figures.items():
        yield [
            *(model, side, f"{stored / quickest[side] / 1e9:.2f}"),
            f"{quickest['read'] / quickest[side]:.2f}",
            f"{max(cost['read_bytes'] for cost in costs) / stored:.3f}",
            f"{max(cost['peak_bytes'] for cost in costs) / stored:.3f}",
        ]


if __name__ == "__main__":
    gc.disable()
    with simulated_disk(float(sys.argv[3] or 0)):
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
