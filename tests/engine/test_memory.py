"""What the KV cache holds and copies: pages, tails, windows, and nothing in a decode step."""

import gc

import mlx.core as mx
import pytest
from engine.harness import PAGE, Harness, prompt, tiny_model

from mlxinfer.cache.kv import FIRST_PAGES, KVCache, page_counts
from mlxinfer.cache.layout import lay_out
from mlxinfer.config import KVOptions
from mlxinfer.core import KVSpec, SamplingParams
from mlxinfer.errors import InsufficientMemoryError


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


def test_memory_grows_with_the_lengths_of_mixed_requests() -> None:
    """One request of 5k tokens and seven of 100: within 5 % of the ideal, and no padded row."""
    model = tiny_model("qwen3-v4")
    harness = Harness(model, prefill_chunk=512, max_context=10_000, num_pages=600)
    for seed, length in enumerate([5000] + [100] * 7):
        harness.add(str(seed), prompt(length, seed), SamplingParams(max_tokens=40))
    while any(not s.decodes for s in harness.loop.scheduler.queues.unfinished()):
        harness.turn()
    harness.turn(5)
    assert len(harness.loop.scheduler.queues.running) == 8
    assert held_bytes(harness) <= 1.05 * ideal_bytes(harness)
    counters = harness.loop.scheduler.counters
    assert counters.prompt_tokens_computed == 5700
    sampled = counters.tokens_computed - counters.prompt_tokens_computed
    harness.drain()
    assert counters.tokens_computed == 5700 + 8 * 39, "padding, or something computed twice"
    assert sampled > 0


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


def big_heads() -> tuple[Harness, int]:
    """A harness with a pool larger than all else that a step touches; bytes of one K array."""
    harness = Harness(tiny_model("qwen3-v4"), num_pages=8000, max_batch=4, max_context=100_000)
    return harness, harness.loop.cache.paged[0].keys.pages[0].nbytes


def test_a_decode_step_copies_no_pages_though_one_is_in_flight() -> None:
    """mlx-lm's overlap copies its cache every step (twice the bytes at the peak); tails do not."""
    harness, array_bytes = big_heads()
    for name, length in (("a", 600), ("b", 40)):
        harness.add(name, prompt(length), SamplingParams(max_tokens=200))
    harness.turn(20)
    tails = sum(pool.tail_bytes for pool in harness.loop.cache.paged)
    mx.synchronize()
    before, copied = mx.get_active_memory(), harness.loop.cache.bytes_copied
    mx.reset_peak_memory()
    harness.turn(40)
    extra = mx.get_peak_memory() - before
    assert extra < array_bytes / 2, "some K or V array was there twice"
    behind_barriers = 40 - (harness.loop.cache.bytes_copied - copied) / tails
    assert 0 < behind_barriers <= 4, "steps that wait for the one before copy nothing"
    assert harness.loop.scheduler.counters.pages_sealed >= 4, "no barrier in between"
    harness.loop.abort_all()
    harness.drain()


def test_joining_and_leaving_copies_nothing() -> None:
    harness, array_bytes = big_heads()
    harness.add("long", prompt(600), SamplingParams(max_tokens=300))
    for name in ("first", "second"):  # tails shrink when the first has left
        harness.add(name, prompt(40), SamplingParams(max_tokens=5))
        harness.turn(20)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    grown = harness.loop.cache.bytes_grown
    for i in range(4):
        harness.add(f"joins{i}", prompt(40 + i), SamplingParams(max_tokens=3 + i))
        harness.turn(8)
    assert mx.get_peak_memory() - before < array_bytes / 2
    assert harness.loop.cache.bytes_grown == grown
    harness.loop.abort_all()
    harness.drain()


def test_a_held_view_would_be_noticed() -> None:
    """The same watch over a step that does hold a view: it must see the copy."""
    harness, array_bytes = big_heads()
    harness.add("a", prompt(600), SamplingParams(max_tokens=200))
    harness.turn(14)
    mx.synchronize()
    held = [pool.keys.pages[0][:, :5] for pool in harness.loop.cache.paged]
    gc.collect()  # arrays of earlier tests are not freed meanwhile
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    harness.turn(40)
    assert mx.get_peak_memory() - before > array_bytes / 2
    del held
    harness.loop.abort_all()
    harness.drain()


def cache(budget: int, **changes: object) -> KVCache:
    spec = KVSpec(2, 64, 64)
    windowed = KVSpec(2, 64, 64, window=32)
    sizes = {"page_size": 16, "max_batch": 4, "prefill_chunk": 64, "budget_bytes": budget}
    layers = lay_out([spec, windowed], KVOptions(), dtype=mx.float32, key_bias=False)
    return KVCache(layers, **{**sizes, **changes})  # type: ignore[arg-type]


def test_the_budget_bounds_every_array_even_while_they_grow() -> None:
    budget = 60_000_000
    specs = [KVSpec(2, 64, 64)] * 12 + [KVSpec(2, 64, 64, window=32)] * 4
    mx.clear_cache()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kv = KVCache(
        lay_out(specs, KVOptions(), dtype=mx.float32, key_bias=False),
        page_size=16,
        max_batch=4,
        prefill_chunk=64,
        budget_bytes=budget,
    )
    for count in (1, 2, 4):
        for group in kv.groups:
            allocator = group.allocator
            while allocator.num_held < allocator.num_pages * count // 4:
                allocator.allocate(1)
        kv.make_room(count)
    assert mx.get_peak_memory() - before <= budget
    assert kv.bytes_allocated > 0.85 * budget


@pytest.mark.parametrize("crowd", [4, 64])
def test_after_a_crowd_a_step_copies_the_tails_that_are_held(crowd: int) -> None:
    """Each step copies all tails that there are: those of a crowd go when it has left."""
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


def test_pools_start_small_and_grow() -> None:
    kv = cache(200_000_000)
    small = kv.bytes_allocated
    assert small < 20_000_000
    full = kv.groups[0]
    full.allocator.allocate(129)
    assert kv.must_grow(1)
    kv.make_room(1)
    assert kv.paged[0].num_pages == 256
    assert not kv.must_grow(1)


def test_tokens_stay_the_same_while_arrays_grow() -> None:
    """Prompts that are kept fill the first pages."""
    model = tiny_model("qwen3-v4")
    grows, fixed = Harness(model, kv_budget_bytes=1 << 30), Harness(model, num_pages=1000)
    cache = grows.loop.cache
    assert {layer.num_pages for layer in cache.paged} == {FIRST_PAGES}
    for i in range(45):
        for harness in (grows, fixed):
            harness.add(str(i), prompt(40, i), SamplingParams(max_tokens=2))
            harness.drain()
    assert {layer.num_pages for layer in cache.paged} == {256}
    assert [o.token_ids for o in grows.outcomes.values()] == [
        o.token_ids for o in fixed.outcomes.values()
    ]


def test_windows_get_no_more_than_can_be_held() -> None:
    kv = cache(200_000_000)
    full, windowed = kv.groups
    assert windowed.allocator.num_pages == 4 * (2 + 2) + 4
    assert full.allocator.num_pages > 1000


def test_a_budget_too_small_says_so() -> None:
    with pytest.raises(InsufficientMemoryError, match="raise max_memory"):
        cache(100_000)


def test_few_tails_where_memory_is_small() -> None:
    kv = cache(2_000_000, max_batch=64)
    assert 1 <= kv.max_batch < 64


def test_a_rank_without_paged_layers_does_not_limit_the_others() -> None:
    """All ranks have as many pages as the one with the least: 4 KB a token in 64 GB here."""
    some = page_counts([64 << 10], 64 << 30, max_held=[None], num_pages=None)
    none = page_counts([0], 64 << 30, max_held=[None], num_pages=None)
    assert some == [1 << 20]
    assert none >= some


@pytest.mark.parametrize("case", ["qwen3-v4", "gemma3_text-v4"])
def test_answers_of_one_token_leave_nothing(case: str) -> None:
    """No later step reads what their prompts wrote, which would keep all of the prompts' work."""
    harness = Harness(tiny_model(case), prefill_chunk=64, max_context=1000, prefix_cache=False)
    active = []
    for i in range(12):
        harness.add(f"{i}", prompt(100, i), SamplingParams(max_tokens=1))
        harness.drain()
        gc.collect()
        active.append(mx.get_active_memory())
    assert active[-1] - active[3] < 400_000, active  # a megabyte and more if they are kept
