"""Experts that are read when tokens need them: every request gets the tokens of the resident run.

Programs like those of test_matrix.py, over mixtures of which a random share is in memory: one
expert more than a token needs up to all but one, read from stacks and from tensors of their own,
by a disk with reads of random times.

    MLXINFER_PROGRAMS=300 HYPOTHESIS_SEED=7 pytest tests/engine/test_streamed_experts.py -s
"""

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import hypothesis
import mlx.core as mx
import numpy as np
import pytest
from engine.harness import PAGE, Harness, alone, model_of, prompt
from engine.proposers import some_proposer
from engine.test_matrix import NEAR_TIE, Asked, assert_same, kv_options, plain_runs, play, programs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models.expert_layouts import with_stacks
from models.runs import every
from models.tiny import tiny_checkpoint

from benchmarks.checkpoints import Experts, write_checkpoint
from mlxinfer.core import SamplingParams
from mlxinfer.errors import CheckpointError
from mlxinfer.layers.moe import MoE
from mlxinfer.models import ExpertOptions, load
from mlxinfer.models.decoder import Model
from mlxinfer.models.language import reachable
from mlxinfer.models.weights import expert_store
from tests.waiting import wait_until

NUM_PROGRAMS = int(os.environ.get("MLXINFER_PROGRAMS", "2"))
SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
CASES = (
    "qwen3_moe-v4", "mixtral-v4", "deepseek_v3-v4", "glm4_moe-v4", "gemma4_text-v4",
    "qwen3_next-v4", "nemotron_h-v5", "lfm2_moe-v4", "minimax_m2-v4", "kimi_linear-v4",
    "qwen3_5_moe_text-v4", "mistral4-v4", "granitemoehybrid-v4", "deepseek_v4-v5",
)  # fmt: skip
WIDE = Experts(
    **{"hidden": 256, "inner": 96, "layers": 10, "heads": 4, "kv_heads": 2, "head_dim": 64},
    **{"vocab": 512, "experts": 8, "chosen": 2},
)
STORED_ALONE = ("qwen3_moe-v4", "mixtral-v4", "deepseek_v3-v4", "glm4_moe-v4", "minimax_m2-v4")


@cache
def checkpoint(case: str, *, stacks: bool) -> Path:
    folder = tiny_checkpoint(Path(mkdtemp()), case, quantize={"group_size": 32, "bits": 4})
    return with_stacks(folder) if stacks else folder


def streamed(folder: Path, num_slots: int, dtype: str = "auto") -> Model:
    """A model with so many of each layer's experts in memory."""
    whole = load(folder, dtype=dtype, experts=ExpertOptions(1 << 40)).expert_store
    count = whole.layers[0].num_slots
    num_bytes = -(-whole.num_bytes * min(num_slots, count) // count)
    return load(folder, dtype=dtype, experts=ExpertOptions(num_bytes, slow=True))


@pytest.fixture(autouse=True, scope="module")
def _disk_with_moods() -> Iterator[None]:
    rng, read = random.Random(SEED), expert_store.read_runs

    def slow(runs: list[list[expert_store.Target]]) -> None:
        time.sleep(rng.choice([0.0, 0.0, 0.0005, 0.002]))
        read(runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_store, "read_runs", slow)
        yield


@given(data=st.data())
@settings(max_examples=NUM_PROGRAMS, phases=[Phase.generate])  # shrinking would take minutes
@hypothesis.seed(SEED)
def test_streamed_tokens_equal_resident_tokens(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    resident = model_of(case)
    stacks = case in STORED_ALONE and data.draw(st.booleans())
    spare = data.draw(st.integers(0, 4))
    model = streamed(checkpoint(case, stacks=stacks), resident.config.experts_per_token + spare)
    run: list[Asked] = data.draw(programs(()))
    longest = max(asked.length for asked in run)
    options = data.draw(kv_options(case))
    plains = plain_runs(case, options, run)
    guess_seed = data.draw(st.none() | st.integers(0, 2**20))
    answers = {name: plain.token_ids for name, plain in plains.items()}
    harness = Harness(
        model,
        kv=options,
        proposer=some_proposer(guess_seed, resident, answers),
        num_pages=-(-longest // PAGE) + data.draw(st.sampled_from([0, 1, 60])),
        prefill_chunk=data.draw(st.sampled_from([16, 32, 128])),
        max_batch=data.draw(st.sampled_from([1, 3, 16])),
        launch_ahead=data.draw(st.booleans()),
        prefix_cache=data.draw(st.booleans()),
    )
    play(harness, run, data.draw(st.sampled_from([None, 3, 7])))
    for name, plain in plains.items():
        near_tie = 0.0 if options.bits == (None, None) else NEAR_TIE
        assert_same(harness.outcomes[name], plain, near_tie=near_tie)
    stats = harness.loop.stats()["experts"]
    assert stats["misses"] > 0
    assert stats["bytes_read"] > 0
    harness.loop.close()


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "times"),  # the slots of a layer, in the experts of a token
    every(
        3,
        [
            pytest.param(case, times, marks=() if i % 2 == times - 1 else pytest.mark.slow)
            for i, case in enumerate(CASES)
            for times in (1, 2)
        ],
    ),
)
def test_logits_are_the_resident_ones(
    case: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long chunks go in waves, short ones do not: the same sums in the same order."""
    resident = load(checkpoint(case, stacks=False))
    num_slots = times * resident.config.experts_per_token
    ids = prompt(70, 5)
    model = streamed(checkpoint(case, stacks=case in STORED_ALONE), num_slots)
    assert (logits_of(model, ids) == logits_of(resident, ids)).all()


@pytest.mark.alike
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [None, 4])
def test_numbers_are_rounded_as_in_the_resident_model(
    dtype: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = None if bits is None else {"group_size": 32, "bits": bits}
    folder = tiny_checkpoint(tmp_path, "deepseek_v3-v4", quantize=how)  # scales, too, in float32
    models = streamed(folder, 4, dtype=dtype), load(folder, dtype=dtype)
    some, all_of_them = (logits_of(model, prompt(60, 3)) for model in models)
    assert (some == all_of_them).all()


def logits_of(model: Model, ids: list[int]) -> mx.array:
    harness = Harness(model, prefill_chunk=64, prefix_cache=False)
    outcome = harness.run("a", ids, SamplingParams(max_tokens=2), prompt_logits=True)
    assert outcome.error is None, outcome.error
    harness.loop.close()
    return mx.concatenate([mx.array(rows) for rows in outcome.logits])


def test_a_file_that_became_shorter_ends_requests_and_no_others() -> None:
    """What of the experts is in memory goes on answering; nothing is answered wrong."""
    case = "qwen3_moe-v4"
    with TemporaryDirectory() as name:
        folder = tiny_checkpoint(Path(name), case, quantize={"group_size": 32, "bits": 4})
        file = folder / "model.safetensors"
        model, content = streamed(folder, 3), file.read_bytes()
        harness = Harness(model, prefix_cache=False)
        ids, params = prompt(8, 1), SamplingParams(max_tokens=4)
        expected = alone(model_of(case), ids, params).token_ids
        file.write_bytes(content[: len(content) // 3])
        error = harness.run("cut", ids, params).error
        assert "became shorter" in str(error.__cause__ or error)
        assert isinstance(error.__cause__ or error, CheckpointError)
        with file.open("r+b") as again:
            again.write(content)
        assert harness.run("whole", ids, params).token_ids == expected
        harness.loop.close()


def test_a_read_that_cannot_begin_leaves_no_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    case, ids, params = "mixtral-v4", prompt(8, 1), SamplingParams(max_tokens=6)
    harness = Harness(streamed(checkpoint(case, stacks=True), 3), prefix_cache=False)
    submit, calls = ThreadPoolExecutor.submit, iter(range(1000))

    def failing(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        if next(calls) % 7 == 5:
            raise RuntimeError("can't start new thread")
        return submit(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", failing)
    for turn in range(4):
        assert "new thread" in str(harness.run(f"failing {turn}", ids, params).error)
    monkeypatch.undo()
    harness.add("after", ids, params)
    assert harness.drain()["after"].token_ids == alone(model_of(case), ids, params).token_ids
    harness.loop.close()


def test_a_guess_that_failed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made for none; the disk may answer by the time that a router asks."""
    store = streamed(checkpoint("mixtral-v4", stacks=True), 3).expert_store
    layer, chosen = store.layers[0], np.array([[0, 1]], np.int32)
    done = threading.Event()

    def failing(runs: list[list[expert_store.Target]]) -> None:
        done.set()
        raise CheckpointError("the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(expert_store, "read_runs", failing)
        layer.expect(chosen)
        assert done.wait(60)
    store.reader._threads.shutdown()
    store.reader._threads = ThreadPoolExecutor(1)
    wanted = layer.route(chosen)
    layer.begin(wanted, wanted[:0])
    assert (layer.finish(wanted)[chosen] >= 0).all()


@pytest.mark.ci
def test_a_prompt_takes_no_more_memory_than_in_the_resident_model(tmp_path: Path) -> None:
    """What a layer's experts make of all its rows is let go of when the next layer has run."""
    folder, peaks = write_checkpoint(tmp_path, WIDE), []
    for experts in (None, ExpertOptions(1 << 40)):
        model = load(folder, dtype="float32", experts=experts)
        harness = Harness(model, prefill_chunk=512, prefix_cache=False)
        for turn in range(2):  # in the first, memory that stays is taken
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            harness.add(f"{turn}", [5 + turn] * 512, SamplingParams(max_tokens=2))
            assert harness.drain()[f"{turn}"].error is None
        peaks.append(mx.get_peak_memory() - before)
        harness.loop.close()
    assert peaks[1] <= 1.1 * peaks[0]


def test_close_gives_back_threads_and_files() -> None:
    file = checkpoint("mixtral-v4", stacks=False) / "model.safetensors"
    gc.collect()  # models of other tests
    before = set(threading.enumerate())
    harness = Harness(streamed(file.parent, 3))
    assert harness.run("a", prompt(40, 2), SamplingParams(max_tokens=3)).error is None
    readers = set(threading.enumerate()) - before
    assert readers
    assert descriptors(file) > 0
    harness.loop.close()
    del harness
    wait_until(lambda: not any(reader.is_alive() for reader in readers))
    assert descriptors(file) == 0


def descriptors(file: Path) -> int:
    """Of a file, in this process."""
    inode, count = file.stat().st_ino, 0
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the list itself
            count += os.fstat(int(name)).st_ino == inode
    return count


def test_all_mixtures_are_streamed() -> None:
    model = streamed(checkpoint("deepseek_v3-v4", stacks=True), 3)
    store = model.expert_store
    assert len(store.layers) == len(list(reachable(model.layers, MoE))) > 1
    assert model.num_bytes < model_of("deepseek_v3-v4").num_bytes


def test_the_seed_that_is_printed_draws_the_programs() -> None:
    print(f"\n{NUM_PROGRAMS} random programs of streamed experts, HYPOTHESIS_SEED={SEED}")
    assert vars(test_streamed_tokens_equal_resident_tokens)["_hypothesis_internal_use_seed"] == SEED
