"""What the KV cache holds and copies: pages, tails, windows, and nothing in a decode step."""

import gc
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters.cases import folders
from engine.harness import PAGE, Harness, prompt, tiny_model
from models.runs import every

from mlxinfer.cache.budget import FIRST_PAGES, page_counts
from mlxinfer.cache.kv import KVCache
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache_specs import KVSpec
from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.engine.loop import MAX_CACHED_BYTES
from mlxinfer.errors import InsufficientMemoryError
from mlxinfer.speculation.controller import FixedDepth
from mlxinfer.speculation.ngram import NgramProposer
from mlxinfer.speculation.speculation import Speculation
from tests.bytes_taken import bytes_taken


def held_bytes(harness: Harness) -> int:
    """Pages that sequences hold and the tails of those that run."""
    cache = harness.loop.cache
    tails = sum(2 * group.page_bytes for group in cache.groups) * len(
        harness.loop.scheduler.queues.running
    )
    return sum(g.allocator.num_held * g.page_bytes for g in cache.groups) + tails


def ideal_bytes(harness: Harness) -> int:
    """Lengths rounded up to pages."""
    pages = sum(-(-s.num_computed // PAGE) for s in harness.loop.scheduler.queues.running)
    return pages * sum(group.page_bytes for group in harness.loop.cache.groups)


@pytest.mark.ci
def test_memory_grows_with_the_lengths_of_mixed_requests() -> None:
    """One request of 3k tokens and three of 100: within 5 % of the ideal, and no padded row."""
    model = tiny_model("qwen3-v4")
    harness = Harness(model, prefill_chunk=512, max_context=10_000, num_pages=600)
    for seed, length in enumerate([3000] + [100] * 3):
        harness.add(str(seed), prompt(length, seed), SamplingParams(max_tokens=40))
    while any(not s.decodes for s in harness.loop.scheduler.queues.unfinished()):
        harness.turn()
    harness.turn(5)
    assert len(harness.loop.scheduler.queues.running) == 4
    assert held_bytes(harness) <= 1.05 * ideal_bytes(harness)
    counters = harness.loop.scheduler.counters
    assert counters.prompt_tokens_computed == 3300
    sampled = counters.tokens_computed - counters.prompt_tokens_computed
    harness.drain()
    assert counters.tokens_computed == 3300 + 4 * 39, "padding, or something computed twice"
    assert sampled > 0


@pytest.mark.alike
@pytest.mark.parametrize(
    "case", [pytest.param("mistral-v4", marks=pytest.mark.slow), "gemma3_text-v4", "gpt_oss-v4"]
)
def test_windows_hold_a_window_and_a_page(case: str) -> None:
    harness = Harness(tiny_model(case), prefill_chunk=32, max_context=1000)
    harness.add("a", prompt(200), SamplingParams(max_tokens=100))
    harness.add("b", prompt(33), SamplingParams(max_tokens=100))
    scheduler, group = harness.loop.scheduler, len(harness.loop.cache.groups) - 1
    window = scheduler.kv_manager.groups[group].window.size
    assert window == 8
    most = 0
    while not harness.loop.idle:
        computed = {s: s.num_computed for s in scheduler.queues.running}
        harness.turn()
        for sequence in scheduler.queues.running:
            # As the turn began, it let go of what no later token sees.
            held = computed.get(sequence, 0) - sequence.tables[group].first * PAGE
            assert held <= window + PAGE
            most = max(most, held)
    assert most > window, "nothing was held"


def page_arrays(harness: Harness) -> list[mx.array]:
    planes = [plane for layer in harness.loop.cache.paged for plane in layer.planes]
    return [pages for plane in planes for pages in plane.pages]


def read_slowly(harness: Harness) -> None:
    """Let MLX read all pages a while from now, as the end of a long step in flight would."""
    work = mx.ones((512, 512))
    for _ in range(4):
        work = work @ work
    behind = mx.depends(page_arrays(harness), [work])
    mx.async_eval([pages[:, :1] + 0 for pages in behind])


def places(harness: Harness) -> list[int]:
    """Addresses of all page arrays. A view would hold its array: none is left when this returns."""
    addresses = [np.array(pages, copy=False).ctypes.data for pages in page_arrays(harness)]
    mx.synchronize()  # what MLX made for the views is gone
    return addresses


def moves(harness: Harness, turns: int = 60) -> int:
    """Looks after a turn that found a page array elsewhere, while requests come and go.

    Before some turns MLX is busy with pages. A look waits for that, so not every turn has one.
    """
    rng, adapters = random.Random(turns), [None, *harness.loop.adapters.names]
    before, moved = places(harness), 0
    for turn in range(turns):
        if rng.random() < 0.2 or harness.loop.idle:
            ids = prompt(rng.choice([5, 40, 90, 200]), rng.randrange(3))  # some share pages
            params = SamplingParams(max_tokens=rng.choice([1, 30, 100]), ignore_eos=True)
            harness.add(str(turn), ids, params, adapter=rng.choice(adapters))
        if rng.random() < 0.03:
            harness.loop.abort(rng.choice(list(harness.outcomes)))
        if rng.random() < 0.3:
            read_slowly(harness)
        harness.turn()
        if rng.random() < 0.4:
            after = places(harness)
            before, moved = after, moved + (after != before)
    harness.loop.abort_all()
    harness.drain()
    return moved


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "changes"),
    every(
        2,
        [
            ("qwen3-v4", {}), ("qwen3-v4", {"kv": KVOptions(bits=(8, 8))}), ("gemma3_text-v4", {}),
            ("deepseek_v3-v4", {}), ("qwen3-v4", {"num_pages": 30, "max_batch": 4}),
        ],
    ),
    ids=["plain", "8 bits", "windows", "latent", "preempted"],
)  # fmt: skip
def test_no_page_array_moves(case: str, changes: dict[str, Any]) -> None:
    """mlx-lm's overlap copies its cache every step; here a step in flight costs copies of tails."""
    harness = Harness(tiny_model(case), **{"num_pages": 4000, **changes})
    assert moves(harness, turns=200 if "max_batch" in changes else 60) == 0
    scheduler, copied = harness.loop.scheduler, harness.loop.cache.bytes_copied
    assert scheduler.counters.pages_sealed > 5, "no barriers in between"
    assert copied > 0, "no step was in flight"
    assert (scheduler.counters.preemptions > 0) == ("max_batch" in changes)


@pytest.mark.ci
def test_no_page_array_moves_with_adapters_and_guesses() -> None:
    model, sizes = tiny_model("qwen3-v4", quantized=True), {"num_pages": 4000}
    beside = {"kv_budget_bytes": 1 << 29}  # pages leave room for adapters
    harness = Harness(model, adapters=folders("qwen3-v4"), **sizes, **beside)
    assert moves(harness) == 0
    guesses = Speculation([NgramProposer()], FixedDepth(3), max_depth=3, method="ngram")
    harness = Harness(model, proposer=guesses, **sizes)
    assert moves(harness) == 0
    assert guesses.stats()["drafted"] > 20


def test_a_held_view_moves_a_page_array() -> None:
    """The same watch over steps while a view is held: it must see the copies."""
    harness = Harness(tiny_model("qwen3-v4"), num_pages=4000)
    held = [layer.keys.pages[0][:, :5] for layer in harness.loop.cache.paged]
    mx.eval(held)
    assert moves(harness) > 0


SPECS = [KVSpec(2, 64, 64), KVSpec(2, 64, 64, window=32)]


def cache(specs: list[KVSpec], budget: int, **changes: object) -> KVCache:
    sizes = {"page_size": 16, "max_batch": 4, "prefill_chunk": 64, "budget_bytes": budget}
    layers = lay_out(specs, KVOptions(), dtype=mx.float32, key_bias=False)
    return KVCache(layers, **{**sizes, **changes})  # type: ignore[arg-type]


def test_the_budget_bounds_every_array_even_while_they_grow() -> None:
    budget = 60_000_000
    specs = [KVSpec(2, 64, 64)] * 12 + [KVSpec(2, 64, 64, window=32)] * 4

    def filled() -> KVCache:
        kv = cache(specs, budget)
        for count in (1, 2, 4):
            for group in kv.groups:
                allocator = group.allocator
                while allocator.num_held < allocator.num_pages * count // 4:
                    allocator.allocate(1)
            kv.make_room(count)
        return kv

    kv, peak, _ = bytes_taken(filled)
    assert peak <= budget
    assert kv.bytes_allocated > 0.85 * budget


def test_the_budget_has_room_for_tails_that_a_step_makes_anew() -> None:
    budget = 60_000_000
    kv = cache([KVSpec(2, 64, 64)] * 16, budget, max_batch=64)
    [group] = kv.groups
    group.allocator.allocate(group.allocator.num_pages)
    kv.make_room(kv.max_batch)
    tails = 2 * group.page_bytes * kv.max_batch
    assert tails > budget / 10
    assert kv.bytes_allocated + tails <= budget


def test_after_a_crowd_a_step_copies_the_tails_that_are_held() -> None:
    """Each step copies all tails that there are: those of a crowd go when it has left."""
    crowd = 24
    harness = Harness(tiny_model("qwen3-v4"), max_batch=64, num_pages=1000)
    harness.add("stays", prompt(20), SamplingParams(max_tokens=300, ignore_eos=True))
    harness.turn(3)
    for seed in range(1, crowd):
        harness.add(str(seed), prompt(20, seed), SamplingParams(max_tokens=60, ignore_eos=True))
    while len(harness.loop.scheduler.queues.unfinished()) > 1:
        harness.turn()
    cache = harness.loop.cache
    assert cache.groups[0].num_slots >= crowd
    harness.turn(2 * PAGE + 2)  # a barrier comes at least so often
    copied = cache.bytes_copied
    harness.turn(2 * PAGE)
    tail_bytes = sum(2 * group.page_bytes for group in cache.groups)
    assert 0 < cache.bytes_copied - copied <= 2 * PAGE * tail_bytes


@pytest.mark.ci
def test_tokens_stay_the_same_while_arrays_grow() -> None:
    """Prompts that are kept fill the first pages."""
    model = tiny_model("qwen3-v4")
    grows, fixed = Harness(model, kv_budget_bytes=1 << 30), Harness(model, num_pages=1000)
    cache = grows.loop.cache
    assert {layer.num_pages for layer in cache.paged} == {FIRST_PAGES}
    for i in range(45):
        for harness in (grows, fixed):
            harness.run(str(i), prompt(40, i), SamplingParams(max_tokens=2))
    assert {layer.num_pages for layer in cache.paged} == {256}
    assert [o.token_ids for o in grows.outcomes.values()] == [
        o.token_ids for o in fixed.outcomes.values()
    ]


def test_windows_get_no_more_than_can_be_held() -> None:
    kv = cache(SPECS, 200_000_000)
    full, windowed = kv.groups
    assert windowed.allocator.num_pages == 4 * (2 + 2) + 4
    assert full.allocator.num_pages > 1000


def test_a_budget_too_small_says_so() -> None:
    with pytest.raises(InsufficientMemoryError, match="raise max_memory"):
        cache(SPECS, 100_000)


def test_few_tails_where_memory_is_small() -> None:
    kv = cache(SPECS, 2_000_000, max_batch=64)
    assert 1 <= kv.max_batch < 64


def test_a_rank_without_paged_layers_does_not_limit_the_others() -> None:
    """All ranks have as many pages as the one with the least: 4 KB a token in 64 GB here."""
    some = page_counts([64 << 10], 64 << 30, max_held=[None], num_pages=None)
    none = page_counts([0], 64 << 30, max_held=[None], num_pages=None)
    assert some == [1 << 20]
    assert none >= some


@pytest.mark.parametrize("case", every(2, ["qwen3-v4", "gemma3_text-v4"]))
def test_answers_of_one_token_leave_nothing(case: str) -> None:
    """No later step reads what their prompts wrote, which would keep all of the prompts' work."""
    harness = Harness(tiny_model(case), prefill_chunk=64, max_context=1000, prefix_cache=False)
    active = []
    for i in range(12):
        harness.run(f"{i}", prompt(100, i), SamplingParams(max_tokens=1))
        gc.collect()
        active.append(mx.get_active_memory())
    assert active[-1] - active[3] < 400_000, active  # a megabyte and more if they are kept


def test_pages_that_larger_arrays_replaced_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps them for reuse, but no later array has their size."""
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    harness = Harness(tiny_model("qwen3-v4"), prefill_chunk=64)
    harness.run("a", prompt(40, 1), SamplingParams(max_tokens=2))
    before, num_pages = len(cleared), harness.loop.cache.groups[0].num_pages
    harness.run("b", prompt(900, 2), SamplingParams(max_tokens=2))
    assert harness.loop.cache.groups[0].num_pages > num_pages
    assert len(cleared) > before


def test_buffers_of_prompts_are_freed_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps them for reuse; on Metal they are as large as the largest step."""
    harness, cleared = Harness(tiny_model("qwen3-v4"), prefill_chunk=64, prefix_cache=False), []
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for name in "cd":  # pages grow here, which also frees
        harness.add(name, prompt(200, ord(name)), params)
    harness.drain()
    monkeypatch.setattr(mx, "get_cache_memory", lambda: MAX_CACHED_BYTES + 1)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(harness.turns))
    for name in "ab":
        harness.add(name, prompt(200, ord(name)), params)
    outcomes = harness.drain()
    assert len(cleared) == 1
    assert cleared[0] == max(outcome.turns[0] for outcome in outcomes.values())
    monkeypatch.setattr(mx, "get_cache_memory", lambda: MAX_CACHED_BYTES)
    harness.run("e", prompt(200, 3), params)
    assert len(cleared) == 1, "few are kept"
