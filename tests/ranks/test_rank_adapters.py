"""Adapters on a model that is spread over ranks: each has its part of their matrices, and logits
are those of one rank. Ranks are threads here; all families, and four ranks, with

    MLXINFER_ALL_RANKS=1 pytest tests/ranks/test_rank_adapters.py
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from queue import Queue
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters.cases import base, folders
from models.cases import CASES
from models.dense_kv import DenseCache
from models.tiny import tiny_checkpoint
from ranks.threads import ALL, ThreadLink, results_of, run_ranks

from mlxinfer.errors import CheckpointError
from mlxinfer.layers.step import Step
from mlxinfer.models import load, load_share
from mlxinfer.models.adapters.loaded import ModelAdapters, read_adapter
from mlxinfer.models.language import LanguageModel
from mlxinfer.models.weights.share import SPLITTABLE
from mlxinfer.ranks import messages
from mlxinfer.ranks.adapters import POLL_S, OtherAdapters, OwnAdapters
from tests.tables import words

pytestmark = pytest.mark.ci

SOME = words("qwen2-v5 qwen3-v4 gpt_oss-v4 deepseek_v3-v4 qwen3_next-v5 nemotron_h-v4 phi3-v4")
QUANTIZED = ("qwen2-v5",)
SOME_STAGED = ["olmo2-v4", "granitemoehybrid-v4", "llama-v4"]
EVERY = [case for case in CASES if CASES[case]["model_type"] in SPLITTABLE]
IDS = np.random.default_rng(0).integers(3, 90, 40).astype(np.int32)
ROWS = np.random.default_rng(1).integers(0, 4, 40).astype(np.int32)  # adapters of rows; 0: none


@cache
def checkpoint(case: str) -> Path:
    """A quantised one where its groups can be divided."""
    return base(case) if case in QUANTIZED else tiny_checkpoint(Path(mkdtemp()), case)


def load_all(model: LanguageModel, adapters: Mapping[str, Path]) -> ModelAdapters:
    """As ranks do: all pieces of one adapter after the other."""
    loaded = ModelAdapters(model)
    for number, folder in enumerate(adapters.values(), 1):
        adapter = read_adapter(folder)
        for _ in loaded.load(number, adapter, loaded.check(adapter)):
            pass
    return loaded


def logits_of(model: LanguageModel, adapters: np.ndarray | None = ROWS) -> np.ndarray:
    caches = DenseCache(model).step([("a", len(IDS))])
    positions = mx.arange(len(IDS), dtype=mx.int32)
    hidden = model(mx.array(IDS), Step(positions, caches, adapters=adapters))
    return np.array(model.logits(hidden, adapters))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= 1e-4 * max(1.0, float(expected.std()))
    assert (actual.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.alike
@pytest.mark.parametrize("size", [2, 4] if ALL else [2])
@pytest.mark.parametrize("case", EVERY if ALL else SOME)
def test_parts_with_adapters_give_the_logits_of_one_rank(case: str, size: int) -> None:
    """LoRA of two ranks and DoRA in one step, on quantised bases; and the plain model after."""
    whole = load(checkpoint(case))
    plain = logits_of(whole, None)
    at_once = load_all(whole, folders(case))
    expected = logits_of(whole)
    numbers = range(1, 1 + len(folders(case)))
    sizes = {number: at_once.bytes_of(number) for number in numbers}

    def work(link: ThreadLink) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
        model = load_share(checkpoint(case), link.rank, link)
        loaded = load_all(model, folders(case))
        num_bytes = {number: loaded.bytes_of(number) for number in sizes}
        mixed = logits_of(model)
        for number in sizes:
            loaded.remove(number)
        return mixed, logits_of(model, None), num_bytes

    results = results_of(size, work)
    assert_close(results[0][0], expected)
    assert_close(results[0][1], plain)
    for *_, num_bytes in results:
        for number, total in sizes.items():
            assert num_bytes[number] < 0.9 * total, "a part of each matrix"


@pytest.mark.parametrize("size", [2, 3] if ALL else [2])
@pytest.mark.parametrize("case", SOME_STAGED)
def test_stages_with_adapters_give_the_logits_of_one_rank(case: str, size: int) -> None:
    whole = load(checkpoint(case))
    at_once = load_all(whole, folders(case))
    expected = logits_of(whole)
    total = sum(at_once.bytes_of(number) for number in (1, 2, 3))

    def work(link: ThreadLink) -> tuple[np.ndarray, int]:
        model = load_share(checkpoint(case), link.rank, link, pipeline=True)
        loaded = load_all(model, folders(case))
        return logits_of(model), sum(loaded.bytes_of(number) for number in (1, 2, 3))

    results = run_ranks(size, work)
    assert (results[0][0] == expected).all(), "each layer is computed as it is on one rank"
    assert sum(num_bytes for _, num_bytes in results) == total
    assert all(num_bytes for _, num_bytes in results)


def test_a_look_for_answers_holds_no_step_up() -> None:
    """Others take seconds to read an adapter, and this thread runs the steps meanwhile."""
    adapter = read_adapter(next(iter(folders("qwen2-v5").values())))
    came = [messages.AdapterDone(rank, 1, 7, None, 100 * rank, False) for rank in (1, 2)]
    waits: list[float] = []

    def hear(_: type, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return came.pop() if len(waits) > 3 and came else None

    way = messages.Others(2, lambda *_: None, hear, AssertionError, step_s=1.0)
    others, most = OtherAdapters(way), []

    def checking() -> Iterator[float]:
        most.append((yield from others.check(7, adapter)))

    assert list(checking()) == [POLL_S] * 3
    assert most == [200]
    assert set(waits) == {0.0}


@pytest.mark.parametrize("change", ["names", "shapes"])
def test_a_file_that_is_another_when_loaded_is_refused(tmp_path: Path, change: str) -> None:
    """Between the look at its names and the load: no KeyError in the middle of it."""
    folder = tmp_path / "adapter"
    shutil.copytree(next(iter(folders("qwen2-v5").values())), folder)
    adapter, loaded = read_adapter(folder), ModelAdapters(load(checkpoint("qwen2-v5")))
    placements = loaded.check(adapter)
    tensors = dict(mx.load(str(adapter.file)))
    mx.eval(tensors)
    name = adapter.modules[-1].a
    array = tensors.pop(name)
    tensors |= {f"{name}.other": array} if change == "names" else {name: array[:1, :1]}
    mx.save_safetensors(str(adapter.file), tensors)
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        loaded.load(1, adapter, placements)


@pytest.mark.parametrize("change", ["deleted", "shorter"])
def test_a_file_that_changes_behind_the_check_ends_no_rank(tmp_path: Path, change: str) -> None:
    """What is open may be deleted; a file that became shorter is an answer with a reason."""
    folder = tmp_path / "adapter"
    shutil.copytree(next(iter(folders("qwen2-v5").values())), folder)
    adapter = read_adapter(folder)
    answers: Queue[messages.AdapterDone] = Queue()
    adapters = OwnAdapters(1, answers.put)
    adapters.begin(1, load(checkpoint("qwen2-v5")))
    adapters.check(7, str(folder), adapter.identity)
    assert answers.get(timeout=60).problem is None
    if change == "deleted":
        adapter.file.unlink()
    else:
        os.truncate(adapter.file, adapter.file.stat().st_size // 2)
    for _ in range(100):
        adapters.piece(7)
        answer = answers.get_nowait()
        if answer.ended:
            break
    if change == "deleted":
        assert answer.problem is None
    else:
        assert answer.problem is not None
        assert "it became shorter" in answer.problem
