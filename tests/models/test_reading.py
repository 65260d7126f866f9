"""Weights are read once, straight to their place, with a layer more in memory at most."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models.cases import CASES
from models.runs import every
from models.tiny import arrays_in, tiny_checkpoint

from benchmarks.checkpoints import Dense, Experts, write_checkpoint
from mlxinfer import LLM
from mlxinfer.errors import CheckpointError
from mlxinfer.models import load
from mlxinfer.models.config import load_config
from mlxinfer.models.registry import family
from mlxinfer.models.weights import files, tensors
from mlxinfer.models.weights.files import WeightFile
from mlxinfer.models.weights.placing import NOWHERE
from mlxinfer.models.weights.source import Checkpoint
from mlxinfer.models.weights.tensors import FileTensor, load_tensors, loaded, side_by_side, stacked
from mlxinfer.models.weights.weights import Weights
from tests.bytes_taken import bytes_taken

SIZES = {
    "hidden": 256,
    "inner": 768,
    "layers": 10,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 512,
}
DENSE = Dense(**SIZES)
EXPERTS = Experts(**{**SIZES, "inner": 96}, experts=8, chosen=2)


class Reads:
    """Bytes of files that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[Path, int, int]] = []
        plain = WeightFile.read_into

        def read_into(file: WeightFile, views: Sequence[memoryview], start: int) -> None:
            self.ranges.append((file.path, start, start + sum(map(len, views))))
            plain(file, views, start)

        monkeypatch.setattr(WeightFile, "read_into", read_into)

    @property
    def total(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)

    def check_once(self) -> None:
        """No byte is in two of the ranges."""
        ends: dict[Path, int] = {}
        for path, start, stop in sorted(self.ranges):
            assert start >= ends.get(path, 0), f"bytes from {start} of {path} are read twice"
            ends[path] = stop


def data_bytes(folder: Path) -> int:
    headers = files.read_headers(folder).values()
    return sum(info.end - info.start for header in headers for info in header.values())


# Of a family's cases the last; the others in the slow run.
LAST = {case.rpartition("-")[0]: case for case in CASES}.values()
ONE_OF_EACH_FAMILY = [
    pytest.param(case, marks=() if case in LAST else pytest.mark.slow) for case in CASES
]


@pytest.mark.alike
@pytest.mark.parametrize("case", every(4, ONE_OF_EACH_FAMILY))
def test_each_byte_is_read_once_and_none_by_an_unplaced_model(case, tmp_path, monkeypatch):
    """Of which all is built, and nothing is computed."""
    folder = tiny_checkpoint(tmp_path, case)
    config, reads = load_config(folder), Reads(monkeypatch)
    builder = family(config.model_type)

    def build() -> Any:
        source = Checkpoint(load_tensors(folder), builder.tensor_name)
        return builder.build(config, Weights(source, NOWHERE, dtype="float32"))

    model, peak, _ = bytes_taken(build)
    assert reads.ranges == []
    assert len(model.layers) == config.num_layers
    assert peak < model.num_bytes / 2
    model = load(folder)
    reads.check_once()
    assert model.num_bytes * 0.9 <= reads.total <= data_bytes(folder)


@pytest.mark.alike
@pytest.mark.parametrize("sizes", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_the_weights_and_one_layer_at_most(sizes, dtype, tmp_path):
    """What is stored as it is used is held once; else a layer is held beside what it becomes."""
    folder = write_checkpoint(tmp_path, sizes)
    load(folder, dtype=dtype)  # what is made once is there
    model, peak, held = bytes_taken(lambda: load(folder, dtype=dtype))
    layer = (data_bytes(folder) + model.num_bytes) / sizes.layers
    more = 0.01 * model.num_bytes if dtype == "float32" else layer
    assert peak <= model.num_bytes + more
    assert held <= model.num_bytes * 1.01


def test_matrices_that_become_one_are_never_held_twice(tmp_path):
    folder = write_checkpoint(tmp_path, EXPERTS)
    tensors = load_tensors(folder)
    front = "model.layers.0.mlp.experts"
    stacks = [
        stacked([tensors[f"{front}.{i}.{name}_proj.weight"] for i in range(EXPERTS.experts)])
        for name in ("gate", "up")
    ]
    both, peak, _ = bytes_taken(lambda: loaded(side_by_side(stacks, -2)))
    assert both.shape == (EXPERTS.experts, 2 * EXPERTS.inner, EXPERTS.hidden)
    assert peak == both.nbytes


def test_what_lies_together_in_a_file_is_one_read_wherever_it_goes(tmp_path, monkeypatch):
    """Gate and up of 1,500 experts alternate in memory; a call fills 1,024 places at most."""
    gate, up = (mx.random.normal((1500, 4, 8)) for _ in range(2))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"gate": gate, "up": up})
    tensors, calls, plain = load_tensors(tmp_path), [], os.preadv

    def preadv(fd: int, views: list[memoryview], start: int) -> int:
        calls.append(len(views))
        return plain(fd, views, start)

    monkeypatch.setattr(os, "preadv", preadv)
    both = loaded(side_by_side([tensors["gate"], tensors["up"]], -2))
    assert mx.array_equal(both, mx.concatenate([gate, up], axis=-2))
    assert calls == [1024, 1024, 952]


def test_arrays_put_together_in_files_are_those_put_together_in_memory(tmp_path, monkeypatch):
    """Random programs of joins, stacks and cuts, in one thread and in several."""
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    chance = random.Random(seed)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        chunk = chance.choice([7, 64, 1 << 20])
        monkeypatch.setattr(tensors, "CHUNK_BYTES", chunk)
        dtype = chance.choice([np.float32, np.float16, np.uint32, np.uint8])
        shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 3)))
        arrays = [rng.integers(0, 99, shape).astype(dtype) for _ in range(6)]
        for number in range(2):
            some = {f"{i}": mx.array(arrays[i]) for i in range(number, 6, 2)}
            mx.save_safetensors(str(tmp_path / f"model-{number}.safetensors"), some)
        result = load_tensors(tmp_path)
        files: list[FileTensor] = [result[f"{i}"] for i in range(6)]
        while len(files) > 1:  # of equal shapes, so that they can be stacked
            groups = [(files[i : i + 2], arrays[i : i + 2]) for i in range(0, len(files), 2)]
            axis = chance.randrange(-files[0].ndim, 0)
            stack = len(files) % 2 == 0 and chance.random() < 0.4
            files = [stacked(f) if stack else side_by_side(f, axis) for f, _ in groups]
            arrays = [np.stack(a) if stack else np.concatenate(a, axis) for _, a in groups]
            place = chance.randrange(arrays[0].ndim)
            size = chance.randint(1, min(array.shape[place] for array in arrays))
            start = chance.randint(0, min(array.shape[place] for array in arrays) - size)
            files = [file.cut(place, start, start + size) for file in files]
            arrays = [array.take(range(start, start + size), place) for array in arrays]
            if len({array.shape for array in arrays}) > 1:  # one had no other to be joined with
                files, arrays = files[:1], arrays[:1]
        assert files[0].shape == arrays[0].shape
        assert (np.array(loaded(files[0])) == arrays[0]).all()


def test_what_was_read_is_not_read_again(tmp_path, monkeypatch):
    tensors = load_tensors(write_checkpoint(tmp_path, DENSE))
    reads = Reads(monkeypatch)
    key = tensors["model.layers.0.self_attn.k_proj.weight"]
    value = tensors["model.layers.0.self_attn.v_proj.weight"]
    first = key.read()
    assert key.read() is first
    joined = loaded(side_by_side([key, value], -2))
    assert mx.array_equal(joined, mx.concatenate([first, value.read()]))
    twice = loaded(side_by_side([key, key], -2))
    assert mx.array_equal(twice, mx.concatenate([first, first]))
    reads.check_once()


def test_no_thread_of_mlx_keeps_what_it_read_from(tmp_path, monkeypatch):
    """Such a thread needs Python, and aborts a process that ends meanwhile."""
    left: list[weakref.ref[Any]] = []
    plain = tensors._Source.__init__

    def remember(source: Any, some: list[FileTensor]) -> None:
        plain(source, some)
        left.append(weakref.ref(source))

    monkeypatch.setattr(tensors._Source, "__init__", remember)
    actual = load_tensors(write_checkpoint(tmp_path, DENSE))
    large = [tensor for tensor in actual.values() if tensor.nbytes > tensors.SMALL_BYTES]
    for tensor in large:
        tensor.read()
        assert left[-1]() is None
    assert len(left) == len(large) > 0


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 100_000)  # several threads
    folder = write_checkpoint(tmp_path, DENSE)
    path = folder / "model.safetensors"
    result = load_tensors(folder)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends at byte \d+.*shorter"):
        [tensor.read() for tensor in result.values()]


def test_a_file_that_is_replaced_while_it_is_read_stays_what_it_was(tmp_path):
    folder = write_checkpoint(tmp_path / "one", DENSE)
    expected = arrays_in(folder)
    actual = load_tensors(folder)
    other = write_checkpoint(tmp_path / "two", DENSE, seed=1)
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    assert all(mx.array_equal(tensor.read(), expected[name]) for name, tensor in actual.items())


@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_a_disk_that_fails(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tensors, "CHUNK_BYTES", chunk)
    folder = write_checkpoint(tmp_path, DENSE)
    plain, calls = os.preadv, Counter[str]()

    def preadv(fd: int, views: list[memoryview], start: int) -> int:
        calls["all"] += 1
        if calls["all"] == 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, views, start)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Input/output"):
        load(folder)


def test_a_read_that_gives_less_goes_on(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, DENSE)
    expected = arrays_in(folder)
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, v, start: plain(fd, [v[0][:4097]], start))
    for name, tensor in load_tensors(folder).items():
        assert mx.array_equal(tensor.read(), expected[name]), name


def test_ctrl_c_ends_the_loading(monkeypatch):
    """At the next layer, on a slow disk."""
    reads = Reads(monkeypatch)
    LLM("demo").close()
    num_reads, plain = len(reads.ranges), WeightFile.read_into
    reads.ranges.clear()

    handled = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    def slow(file: WeightFile, views: Sequence[memoryview], start: int) -> None:
        plain(file, views, start)
        if len(reads.ranges) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if len(reads.ranges) >= 3:
            assert handled.wait(60)
        time.sleep(0.2)  # until those that wait their turn are given up

    monkeypatch.setattr(WeightFile, "read_into", slow)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            LLM("demo")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(reads.ranges) < num_reads / 2


INTERRUPTED = """
import gc, os, signal, sys, threading
from pathlib import Path
import mlx.core as mx
from mlxinfer.models.weights.files import WeightFile
from mlxinfer.models.weights.tensors import load_tensors

begun, may_go, plain = threading.Event(), threading.Event(), WeightFile.read_into

def read_into(file, views, start):
    begun.set()
    assert may_go.wait(60)
    plain(file, views, start)

def interrupt():
    assert begun.wait(60)
    os.kill(os.getpid(), signal.SIGINT)

def interrupted():
    tensor = load_tensors(Path(sys.argv[1]))["model.embed_tokens.weight"]
    threading.Thread(target=interrupt).start()
    try:
        tensor.read()
    except KeyboardInterrupt:
        return tensor.nbytes

WeightFile.read_into = read_into
before = mx.get_active_memory()
num_bytes = interrupted()
gc.collect()
print("while a thread reads", mx.get_active_memory() - before >= num_bytes)
may_go.set()
for thread in threading.enumerate():
    if thread.name.startswith("mlxinfer-weights"):
        thread.join(60)
gc.collect()
print("after it", mx.get_active_memory() - before >= num_bytes)
"""


def test_memory_stays_while_a_thread_writes_to_it(tmp_path):
    """An interrupt is not held up by the disk, and nothing is freed below a read.

    In a process of its own: what other tests free would be counted.
    """
    command = [sys.executable, "-c", INTERRUPTED, str(write_checkpoint(tmp_path, DENSE))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["while a thread reads True", "after it False"], done.stderr
