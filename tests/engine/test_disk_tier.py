"""What memory has no room for goes to the disk and comes back, and no token changes by it."""

import os
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapters.cases import folders
from engine.harness import PAGE, Harness, Outcome, alone, disk_at, prompt, tiny_model
from engine.test_faults import break_launch

from mlxinfer.cache.disk import group_key
from mlxinfer.cache.prefix import PageNames
from mlxinfer.config import DiskOptions, KVOptions
from mlxinfer.core import FinishReason, Request, SamplingParams
from mlxinfer.engine.kernels import Kernels, choose_none
from mlxinfer.engine.pagestore import SAVE_S
from mlxinfer.metal_kernels import selfcheck

CASES = ("qwen3-v4", "mistral-v4", "gemma3_text-v4")
FEW = SamplingParams(max_tokens=4)


def on_disk(folder: Path, case: str = "qwen3-v4", **changes: Any) -> Harness:
    """A loop that keeps its pages under `folder`."""
    model = tiny_model(case, quantized=True)
    return Harness(**{"model": model, "disk": disk_at(folder, case), **changes})


def answer(harness: Harness, ids: list[int], params: SamplingParams = FEW) -> Outcome:
    """One request until its end, and the disk's writer with it."""
    name = str(len(harness.outcomes))
    outcome = harness.run(name, ids, params)
    harness.turn()  # what the last step left
    harness.loop.store.disk.flush()
    return outcome


def leave(ids: list[int], folder: Path, case: str = "qwen3-v4") -> None:
    """An earlier loop had a prompt, and its pages are under `folder`."""
    earlier = on_disk(folder, case)
    answer(earlier, ids)
    earlier.loop.close()


def plain(case: str, ids: list[int], params: SamplingParams = FEW, **changes: object) -> list[int]:
    return alone(tiny_model(case, quantized=True), ids, params, **changes).token_ids


def computed(harness: Harness, work: Callable[[], Outcome]) -> tuple[Outcome, int]:
    """What `work` gave, and how many prompt tokens it took."""
    counters = harness.loop.scheduler.counters
    before = counters.prompt_tokens_computed
    outcome = work()
    return outcome, counters.prompt_tokens_computed - before


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "bits"), [("qwen3-v4", 8), ("gemma3_text-v4", None), ("gpt_oss-v4", None)]
)
def test_an_evicted_prefix_comes_back(case: str, bits: int | None, tmp_path: Path) -> None:
    kv = KVOptions(bits=(bits, bits))
    harness = on_disk(tmp_path, case, num_pages=9, kv=kv)
    shared = prompt(100)
    first = answer(harness, shared)
    for seed in (1, 2):
        answer(harness, prompt(120, seed))
    again, num_computed = computed(harness, lambda: answer(harness, shared))
    assert again.token_ids == first.token_ids
    assert num_computed <= 100 - 96
    assert again.cached_tokens >= 96
    assert harness.loop.stats()["disk"]["tokens_loaded"] >= 64
    if bits is None:
        assert first.token_ids == plain(case, shared)


def test_pages_of_a_failed_step_do_not_go_to_the_disk(tmp_path: Path) -> None:
    harness = on_disk(tmp_path, num_pages=9)
    answer(harness, prompt(100))
    kv_manager = harness.loop.scheduler.kv_manager
    kv_manager.prefix.evict(0, 2)
    spills = kv_manager.take_work().spill
    assert spills
    kv_manager.prefix.evict(0, 2)
    kv_manager.forget()
    assert not kv_manager.take_work().writes_pages


@pytest.mark.parametrize("case", CASES)
def test_a_restart_finds_cached_prefixes(case: str, tmp_path: Path) -> None:
    shared = prompt(100)
    earlier = on_disk(tmp_path, case)
    answer(earlier, shared)
    assert not files_in(tmp_path), "nothing goes to the disk while there is room"
    earlier.loop.close()
    assert files_in(tmp_path)
    later = on_disk(tmp_path, case)
    ids = shared[:90] + prompt(20, 5)
    outcome, num_computed = computed(later, lambda: answer(later, ids))
    assert outcome.token_ids == plain(case, ids)
    assert (num_computed, outcome.cached_tokens) == (110 - 80, 80)


@pytest.mark.alike
@pytest.mark.parametrize("case", ["deepseek_v4-v4", *CASES, "qwen3_next-v4"])
def test_pages_in_memory_hide_none_on_the_disk(case: str, tmp_path: Path) -> None:
    """The next turn brings the last pages of a window; the turn before needs earlier ones."""
    shared, ten = prompt(90), SamplingParams(max_tokens=10, ignore_eos=True)
    earlier = on_disk(tmp_path, case, num_pages=40)
    said = answer(earlier, shared, ten)
    again = answer(earlier, shared, ten).cached_tokens
    earlier.loop.close()
    later = on_disk(tmp_path, case, num_pages=40)
    answer(later, [*shared, *said.token_ids, 9, 8, 7], ten)
    outcome = answer(later, shared, ten)
    assert outcome.token_ids == said.token_ids
    assert outcome.cached_tokens >= again - again % PAGE >= 80


def test_a_shutdown_in_the_middle_of_a_request_saves_what_it_computed(tmp_path: Path) -> None:
    earlier = on_disk(tmp_path)
    earlier.add("a", prompt(100), SamplingParams(max_tokens=60))
    earlier.turn(30)
    earlier.loop.abort_all()
    earlier.loop.close()
    token_ids = earlier.outcomes["a"].token_ids
    assert 20 < len(token_ids) < 60
    later = on_disk(tmp_path)
    ids = prompt(100) + token_ids
    outcome, num_computed = computed(later, lambda: answer(later, ids))
    assert num_computed <= 2 * PAGE
    assert outcome.token_ids == plain("qwen3-v4", ids)


def test_a_lone_page_is_not_worth_a_look(tmp_path: Path) -> None:
    leave(prompt(40), tmp_path)
    later = on_disk(tmp_path)
    assert answer(later, prompt(40)[:20]).cached_tokens == 0
    assert answer(later, prompt(40)).cached_tokens == 20, "what the request before left"


def test_a_prompt_that_fills_the_pool_comes_back(tmp_path: Path) -> None:
    for case in CASES:
        harness = on_disk(tmp_path / case, case, num_pages=7)
        for i in range(4):
            ids = prompt(106, i % 2)
            assert answer(harness, ids).token_ids == plain(case, ids)


def begun_and_ended(folder: Path) -> Harness:
    """A loop in which a request found a prefix on the disk, and went before its first step."""
    leave(prompt(100), folder)
    harness = on_disk(folder)
    scheduler = harness.loop.scheduler
    gone = scheduler.queues.add(Request("gone", prompt(100), FEW), max_output=4)
    scheduler.kv_manager.begin(gone, slot=0, spare=0)
    assert gone.num_computed == 96
    scheduler.kv_manager.end(gone, keep=True)
    scheduler.queues.finish(gone)
    return harness


def test_pages_fetched_for_an_aborted_request_are_there_for_the_next(tmp_path: Path) -> None:
    harness = begun_and_ended(tmp_path)
    for path in files_in(tmp_path):
        path.unlink()
    outcome = answer(harness, prompt(100))
    assert outcome.cached_tokens == 96
    assert outcome.token_ids == plain("qwen3-v4", prompt(100))


def test_pages_that_go_before_they_were_filled_are_not_stored(tmp_path: Path) -> None:
    """Their places in the pool hold what was there before."""
    harness = begun_and_ended(tmp_path)
    for path in files_in(tmp_path):
        path.unlink()
    kv_manager = harness.loop.scheduler.kv_manager
    assert kv_manager.prefix.evict(0, 100) == 6
    assert not kv_manager.take_work().writes_pages


# -- whatever becomes of the files --------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = (truncate, flip, Path.unlink)


@pytest.mark.parametrize(("case", "damage"), [*zip(CASES, DAMAGES, strict=True)])
def test_damage_costs_a_miss(case: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    shared = prompt(100)
    leave(shared, tmp_path, case)
    for path in files_in(tmp_path)[::2]:
        damage(path)
    later = on_disk(tmp_path, case)
    assert answer(later, shared).token_ids == plain(case, shared)
    assert answer(later, prompt(70, 1)).token_ids == plain(case, prompt(70, 1))
    later.loop.close()


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    cached = []
    for _ in range(3):
        harness = on_disk(tmp_path)
        cached.append(answer(harness, prompt(100)).cached_tokens)
        harness.loop.close()
        if len(cached) == 1:
            [folder] = tmp_path.iterdir()
            namespace = bytes.fromhex(folder.name.split(".")[0])
            key = group_key(PageNames(namespace, prompt(100), PAGE).name(3), 0)
            flip(folder / f"{key.hex()}.kv")
    assert cached == [0, 48, 96]


# -- what may not be shared ---------------------------------------------------------------------


def test_other_formats_and_models_find_nothing(tmp_path: Path) -> None:
    shared = prompt(100)
    leave(shared, tmp_path)
    other_model = disk_at(tmp_path, "of other weights")
    for changes in (
        {"kv": KVOptions(bits=(8, 8))},
        {"kv": KVOptions(window=32)},
        {"page_size": 8},
        {"disk": other_model},
    ):
        assert answer(on_disk(tmp_path, **changes), shared).cached_tokens == 0
    narrow = copy(tiny_model("qwen3-v4", quantized=True))
    for dtype in (mx.float16, mx.bfloat16):  # a page of one has the bytes of the other
        narrow.activation_dtype = dtype
        assert answer(on_disk(tmp_path, model=narrow), shared).cached_tokens == 0
    by_kernels = on_disk(tmp_path, kernels=lambda variants: frozenset())
    assert answer(by_kernels, shared).cached_tokens == 0
    assert answer(on_disk(tmp_path), shared).cached_tokens == 96


def test_kernels_of_another_text_are_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity() -> str:
        selfcheck.text_digest.cache_clear()
        return Kernels([], lambda variants: frozenset()).identity

    before, read = identity(), Path.read_bytes
    for name in ("attention_softmax.h", "paged_attention.metal", "launch.py"):
        with monkeypatch.context() as patch:
            patch.setattr(
                Path, "read_bytes", lambda path, x=name: read(path) + (path.name == x) * b" "
            )
            assert identity() != before
    assert identity() == before
    assert Kernels([], choose_none).identity == "plain MLX"


def test_without_a_prefix_cache_the_disk_is_left_alone(tmp_path: Path) -> None:
    harness = on_disk(tmp_path, prefix_cache=False)
    answer(harness, prompt(100))
    harness.loop.close()
    assert not files_in(tmp_path)


@pytest.mark.parametrize("reading", [False, True])
def test_nothing_of_a_failed_step_reaches_the_disk(reading: bool, tmp_path: Path) -> None:
    harness = on_disk(tmp_path, num_pages=9)
    answer(harness, prompt(120))
    break_launch(harness, 1, read=reading)
    assert answer(harness, prompt(120, 1)).reason is FinishReason.ERROR
    harness.loop.close()
    assert not files_in(tmp_path)


def test_two_namespaces_never_share_an_entry_on_the_disk(tmp_path: Path) -> None:
    names, ids = (None, "first", "second"), prompt(6 * PAGE)
    written: dict[str | None, set[str]] = {}
    for name in names:  # each writer is a process of its own, which knows one namespace
        before = {file.name for file in files_in(tmp_path)}
        harness = on_disk(tmp_path, adapters=folders("qwen3-v4"))
        harness.add("writer", ids, FEW, adapter=name)
        assert harness.drain()["writer"].cached_tokens == 0, "pages of another namespace were used"
        harness.loop.close()
        written[name] = {file.name for file in files_in(tmp_path)} - before
        assert len(written[name]) == 6
    harness = on_disk(tmp_path, adapters=folders("qwen3-v4"))
    for name in names:
        assert harness.run(f"reader {name}", ids, FEW, adapter=name).cached_tokens == 5 * PAGE
    harness.loop.close()


def test_requests_do_not_wait_for_the_identity_of_the_weights(tmp_path: Path) -> None:
    """Until it is known nothing is read or stored; then the tier opens, and a shutdown saves."""
    shared = prompt(100)
    leave(shared, tmp_path)
    seen: list[str | None] = [None]
    disk = DiskOptions(folder=tmp_path, max_bytes=1 << 26, identity=lambda timeout_s: seen[0])
    later = Harness(tiny_model("qwen3-v4", quantized=True), disk=disk)
    later.run("early", shared, FEW)
    assert later.loop.store.disk is None
    assert later.outcomes["early"].cached_tokens == 0
    assert later.loop.stats()["disk"]["num_entries"] == 0
    seen[0] = "qwen3-v4"
    other = prompt(100, 5)
    answer(later, other)
    assert later.loop.stats()["disk"]["num_entries"] > 0
    before = set(files_in(tmp_path))
    later.loop.close()
    assert set(files_in(tmp_path)) > before


def test_an_identity_that_comes_at_the_end_still_saves(tmp_path: Path) -> None:
    waits: list[float] = []

    def late(timeout_s: float) -> str | None:
        waits.append(timeout_s)
        return "qwen3-v4" if timeout_s >= SAVE_S else None

    disk = DiskOptions(folder=tmp_path, max_bytes=1 << 26, identity=late)
    earlier = Harness(tiny_model("qwen3-v4", quantized=True), disk=disk)
    earlier.run("a", prompt(100), FEW)
    assert set(waits[1:]) == {0.0}, "steps do not wait"
    earlier.loop.close()
    assert files_in(tmp_path)
    later = on_disk(tmp_path)
    assert answer(later, prompt(100)).cached_tokens >= 80
