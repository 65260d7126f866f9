"""Nothing looks at weights that are not read yet, and their memory stays while they are."""

import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import tiny_model
from models.cases import CASES
from models.dense_kv import DenseCache
from models.tiny import tiny_checkpoint, tiny_config
from pooling.cases import CASES as POOLING
from pooling.tiny_pooling import pooling_folder
from ranks.threads import Meeting, ThreadLink
from speculation.head_checkpoints import dflash_checkpoint, eagle_checkpoint, mtp_checkpoint

from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.layers.step import Step
from mlxinfer.models import ExpertOptions, load, load_share, safetensors
from mlxinfer.models.dflash import load_dflash
from mlxinfer.models.eagle import load_eagle
from mlxinfer.models.language import arrays
from mlxinfer.models.prediction import load_prediction_head
from mlxinfer.models.safetensors import WeightFile
from mlxinfer.models.share import SPLITTABLE
from mlxinfer.models.stage import StageModel
from mlxinfer.models.tensors import FileTensor, begun, load_tensors, readers_of, started
from mlxinfer.pooling.config import read_pooling
from mlxinfer.pooling.model import load_pooling
from tests.bench.checkpoints import Dense, write_checkpoint

LAST = set({case.rpartition("-")[0]: case for case in CASES}.values())
EACH_FAMILY = [pytest.param(case, marks=() if case in LAST else pytest.mark.slow) for case in CASES]
SPLIT = [
    pytest.param(case, marks=() if case in LAST else pytest.mark.slow)
    for case in CASES
    if CASES[case]["model_type"] in SPLITTABLE
]
DENSE = Dense(hidden=256, inner=768, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=512)


class LatePool:
    """Threads that read nothing before it is waited for; see `only_when_awaited`."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., None], task: Any, *more: object) -> Future[None]:
        for read in task:
            for view in read.views:
                view[:] = b"\x7f" * len(view)
        future = Future[None]()
        future.work = lambda: work(task, *more)  # type: ignore[attr-defined]
        return future


@pytest.fixture
def only_when_awaited(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and each byte that nothing has waited for is another one."""

    def wait(futures: Iterable[Any]) -> None:
        for future in futures:
            if not future.done():
                future.set_result(future.work())

    def begin() -> None:
        monkeypatch.setattr(safetensors, "ThreadPoolExecutor", LatePool)
        monkeypatch.setattr(safetensors, "wait", wait)

    return begin


def check_equal(found: Sequence[mx.array], expected: Sequence[mx.array]) -> None:
    assert len(found) == len(expected) > 0
    assert all(np.array_equal(*map(raw, pair)) for pair in zip(found, expected, strict=True))


def raw(array: mx.array) -> np.ndarray:
    return np.array(array.reshape(-1).view(mx.uint8))


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_models(case, tmp_path, only_when_awaited):
    folder = tiny_checkpoint(tmp_path, case)
    expected = list(load(folder).arrays())
    only_when_awaited()
    check_equal(list(load(folder).arrays()), expected)


@pytest.mark.parametrize("case", ["qwen3-v4", "qwen3_moe-v4", "deepseek_v3-v4", "falcon_h1-v4"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_quantised_models(case, mode, tmp_path, only_when_awaited):
    how = {"group_size": 16 if mode == "nvfp4" else 32, "bits": 4, "mode": mode}
    folder = tiny_checkpoint(tmp_path, case, quantize=how)
    try:
        expected = list(load(folder).arrays())
    except UnsupportedModelError as error:  # of a mode that cannot be scaled
        pytest.skip(str(error))
    only_when_awaited()
    check_equal(list(load(folder).arrays()), expected)


@pytest.mark.parametrize("case", SPLIT)
def test_shares_of_ranks(case, tmp_path, only_when_awaited):
    folder = tiny_checkpoint(tmp_path, case)

    def parts() -> list[mx.array]:
        links = [ThreadLink(Meeting(2), rank) for rank in range(2)]
        found = [load_share(folder, link.rank, link) for link in links]  # type: ignore[arg-type]
        return [array for model in found for array in model.arrays()]  # type: ignore[union-attr]

    try:
        expected = parts()
    except UnsupportedModelError as error:  # of sizes that two ranks cannot share
        pytest.skip(str(error))
    only_when_awaited()
    check_equal(parts(), expected)


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_pipeline_stages(case, tmp_path, only_when_awaited):
    folder = tiny_checkpoint(tmp_path, case)

    def parts() -> list[mx.array]:
        found: list[mx.array] = []
        for rank in range(2):
            link: Any = ThreadLink(Meeting(2), rank)
            model = load_share(folder, rank, link, pipeline=True)
            assert isinstance(model, StageModel)
            found += arrays(model.part.layers) if rank else model.part.arrays()
        return found

    try:
        expected = parts()
    except UnsupportedModelError as error:  # too few layers
        pytest.skip(str(error))
    only_when_awaited()
    check_equal(parts(), expected)


@pytest.mark.parametrize("case", ["deepseek_v3-v4", "qwen3_moe-v4"])
def test_streamed_experts(case, tmp_path, only_when_awaited):
    folder = tiny_checkpoint(tmp_path, case, quantize={"group_size": 32, "bits": 4})
    ids = mx.arange(3, 40)

    def logits() -> list[mx.array]:
        model = load(folder, experts=ExpertOptions(1 << 40))
        caches = DenseCache(model).step([("a", len(ids))])
        hidden = model(ids, Step(mx.arange(len(ids), dtype=mx.int32), caches))
        return [model.logits(hidden), *model.arrays()]

    expected = logits()
    only_when_awaited()
    check_equal(logits(), expected)


@pytest.mark.parametrize("kind", ["eagle", "dflash", "mtp"])
def test_heads(kind, tmp_path, only_when_awaited):
    config = tiny_config("qwen3-v4")
    if kind == "mtp":
        mtp_checkpoint(tmp_path, "deepseek_v3-v4", right=True)
        model = load(tmp_path)
    else:
        model = tiny_model("qwen3-v4", quantized=True)
        if kind == "eagle":
            eagle_checkpoint(tmp_path, config, drafted=40)
        else:
            dflash_checkpoint(tmp_path, config, taps=[0, 1])
    make: Any = {"eagle": load_eagle, "dflash": load_dflash, "mtp": load_prediction_head}[kind]
    expected = list(make(tmp_path, model).arrays())
    only_when_awaited()
    check_equal(list(make(tmp_path, model).arrays()), expected)


@pytest.mark.parametrize("case", POOLING)
def test_models_that_pool(case, tmp_path, only_when_awaited):
    folder = pooling_folder(tmp_path, case)
    pooling = read_pooling(folder)
    assert pooling is not None

    def parts() -> list[mx.array]:
        made = load_pooling(folder, pooling)
        return [*made.model.arrays(), *arrays(made.pooler)]

    expected = parts()
    only_when_awaited()
    check_equal(parts(), expected)


def test_what_is_under_way_is_awaited_by_the_next_that_asks(tmp_path, only_when_awaited):
    only_when_awaited()
    folder = write_checkpoint(tmp_path, DENSE)
    tensor = load_tensors(folder)["model.norm.weight"]
    with readers_of([tensor]).ahead():
        begun(tensor)
    expected = mx.load(str(folder / "model.safetensors"))["model.norm.weight"]
    assert mx.array_equal(begun(tensor), expected)


class Held:
    """Reads that go on when they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go, self.ended = threading.Event(), threading.Event(), 0
        plain = WeightFile.read_into

        def read_into(file: WeightFile, views: Sequence[memoryview], start: int) -> None:
            self.begun.set()
            assert self.may_go.wait(10)
            plain(file, views, start)
            self.ended += 1

        monkeypatch.setattr(WeightFile, "read_into", read_into)


class Interrupting(list[Any]):
    """A list at which Ctrl-C comes."""

    def append(self, item: object) -> None:
        raise KeyboardInterrupt


def interrupted(folder: Path, name: str, where: str) -> int:
    """Begin to read a tensor and be interrupted; its bytes."""
    tensor: FileTensor = load_tensors(folder)[name]
    readers = readers_of([tensor])
    if where == "while reads are handed over":
        readers._under_way = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        _start_and_interrupt(tensor)
    return tensor.nbytes


def _start_and_interrupt(tensor: FileTensor) -> None:
    with readers_of([tensor]).ahead():
        started([tensor])
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["while reads are handed over", "behind that"])
def test_memory_stays_while_a_thread_writes_to_it(where, tmp_path, monkeypatch):
    """An interrupt is not held up by the disk, and nothing is freed below a read."""
    folder = write_checkpoint(tmp_path, DENSE)
    held = Held(monkeypatch)
    gc.collect()
    before = mx.get_active_memory()
    num_bytes = interrupted(folder, "model.embed_tokens.weight", where)
    gc.collect()
    assert held.begun.wait(10)
    assert held.ended == 0
    assert mx.get_active_memory() - before >= num_bytes
    held.may_go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("mlxinfer-weights"):
            thread.join(10)
    gc.collect()
    assert held.ended == 1
    assert mx.get_active_memory() - before < num_bytes


def test_an_interrupt_is_one_also_where_the_disk_fails(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise CheckpointError("the disk fails")

    monkeypatch.setattr(WeightFile, "read_into", fails)
    folder = write_checkpoint(tmp_path, DENSE)
    interrupted(folder, "model.norm.weight", "behind that")
