"""`bench load`: how fast weights of a cached file are in their place, beside reading them at all.

Every side is a process of its own, so that all memory is new, and the sides take turns. `read` is
plain parallel preadv of the files into new memory: the limit. `read tensors` reads each tensor from
where it lies to where an allocator puts it, neither at the beginning of a page, as every loader
must. `mlxinfer` loads what a Mac would; `for the CPU` also makes of it what MLX's CPU backend needs
and runs quickest. `python -m tests.bench.load SIDE FOLDER` is one such process.
"""

import gc
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from mlxinfer import hub
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import MlxinferError
from mlxinfer.memory import parse_bytes
from mlxinfer.models.safetensors import read_headers

DTYPE = "bfloat16"  # as it is stored: nothing is converted
THREADS, CHUNK_BYTES = 8, 4 << 20
SMALL = 150_000_000  # bytes


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


def read(folder: Path) -> Callable[[], int]:
    """All bytes of the files, several reads at once."""

    def work() -> int:
        sizes = [(path, path.stat().st_size) for path in _files(folder)]
        reads = []
        for path, size in sizes:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as arrays are allocated
            view, fd = memoryview(mmap.mmap(-1, size, private)), os.open(path, os.O_RDONLY)
            starts = range(0, size, CHUNK_BYTES)
            reads += [(fd, view[at : at + CHUNK_BYTES], at) for at in starts]
        with ThreadPoolExecutor(THREADS) as pool:
            counts = pool.map(lambda one: os.preadv(one[0], [one[1]], one[2]), reads)
            assert sum(counts) == sum(size for _, size in sizes)
        return sum(size for _, size in sizes)

    return work


def read_tensors(folder: Path) -> Callable[[], int]:
    """The same bytes tensor by tensor, each to memory of its own."""

    def work() -> int:
        reads: list[tuple[int, memoryview, int]] = []
        for path, header in read_headers(folder).items():
            fd = os.open(path, os.O_RDONLY)
            begin = path.stat().st_size - max(info.end for info in header.values())
            for info in header.values():
                place = np.empty(info.end - info.start, np.uint8).data
                starts = range(0, len(place), CHUNK_BYTES)
                reads += [
                    (fd, place[at : at + CHUNK_BYTES], begin + info.start + at) for at in starts
                ]
        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(lambda one: os.preadv(one[0], [one[1]], one[2]), reads))

    return work


def ours(folder: Path) -> Callable[[], int]:
    """mlxinfer's model as a Mac has it. It cannot run here where it has experts of 16 bits."""
    from mlxinfer.layers.factory import LayerFactory
    from mlxinfer.models import weights

    work = for_cpu(folder)

    def as_a_mac() -> int:
        with patch.object(weights, "layer_factory", lambda **_: LayerFactory()):
            return work()

    return as_a_mac


def for_cpu(folder: Path) -> Callable[[], int]:
    """mlxinfer's model as MLX's CPU backend runs it."""
    import mlx.core as mx

    import mlxinfer.models.weights  # noqa: F401  # imported before the clock runs
    from mlxinfer.models import load
    from mlxinfer.models.config import load_config

    load_config(folder)

    def work() -> int:
        model = load(folder, dtype=DTYPE)
        assert model.num_bytes
        return int(mx.get_peak_memory())

    return work


def theirs(folder: Path) -> Callable[[], int]:
    """mlx-lm's model, with all parameters evaluated."""
    import importlib

    import mlx.core as mx
    from mlx_lm.utils import load_model

    for name in ("qwen3", "qwen3_moe"):
        importlib.import_module(f"mlx_lm.models.{name}")

    def work() -> int:
        model, _ = load_model(folder, lazy=True)
        mx.eval(model.parameters())
        return int(mx.get_peak_memory())

    return work


SIDES = {
    "read": read,
    "read tensors": read_tensors,
    "mlxinfer": ours,
    "for the CPU": for_cpu,
    "mlx-lm": theirs,
}


def measure(side: str, folder: Path) -> Cost:
    """One load in this process, which has made none."""
    work = SIDES[side](folder)
    read_before, cpu_before, began = _read_bytes(), time.process_time(), time.perf_counter()
    peak = work()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    return Cost(wall_s, cpu_s, _read_bytes() - read_before, peak)


def _read_bytes() -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(counters.read_text().split()[1])  # rchar: from the cache of the system as well


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def apart(side: str, folder: Path) -> Cost:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.load", side, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
    *, size: str = "1.5GB", runs: int = 5, small: bool, peer: bool, cpu_time: bool = False
) -> Report:
    """Loads of a dense model and of a mixture of experts, at 16 and at 4 bits."""
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
                        found[side].append(apart(side, folder))
                rows += _rows(f"{kind}, {label}", stored, found, cpu_time)
                data += [
                    {"model": f"{kind}, {label}", "side": side, "stored": stored, **asdict(cost)}
                    for side, costs in found.items()
                    for cost in costs
                ]
    time_of = "CPU" if cpu_time else "wall"
    table = Table(
        "Loading the weights of cached files",
        ["model", "side", "GB/s", "of reading", "bytes read", "peak memory"],
        rows,
        f"The quickest of each by {time_of} time; bytes and memory in parts of what is stored. "
        "For MLX's CPU backend experts of 16 bits are widened to 32; a Mac takes them as they are.",
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
    print(json.dumps(asdict(measure(sys.argv[1], Path(sys.argv[2])))))
