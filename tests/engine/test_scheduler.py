"""The scheduler alone, no model and no arrays: pages, slots and queues balance."""

import pytest
from cache.prefix_invariants import check
from engine.spelled import segments_of

from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.cache.prefix import common_length
from mlxinfer.core import FinishReason, Request, SamplingParams
from mlxinfer.engine import kv_manager
from mlxinfer.engine.batch import Batch
from mlxinfer.engine.kv_manager import KVManager
from mlxinfer.engine.scheduler import CommitResult, Scheduler

PAGE = 4


def build(
    *,
    pages: int = 64,
    windows: tuple[int | None, ...] = (None,),
    sinks: int = 0,
    max_batch: int = 4,
    chunk: int = 16,
) -> Scheduler:
    groups = [
        PageGroup(
            AttentionWindow(window, sinks if window else 0),
            PageAllocator(pages, headroom=2),
            PAGE,
            prefill_chunk=chunk,
            page_bytes=1,
        )
        for window in windows
    ]
    kv_manager = KVManager(groups, reuse=True)
    return Scheduler(kv_manager, max_batch=max_batch, prefill_chunk=chunk)


def request(name: str, num_prompt: int, max_tokens: int = 8, *, shared: int = 0) -> Request:
    """Its first `shared` tokens are those of every other request, the rest is its own."""
    offset = 1000 * (1 + sum(name.encode()))
    ids = [*range(min(shared, num_prompt)), *range(offset, offset + max(num_prompt - shared, 0))]
    return Request(name, ids, SamplingParams(max_tokens=max_tokens))


def assert_only_cached(scheduler: Scheduler) -> None:
    """Nothing runs: the cache has every page that is not free, and could let go of it."""
    prefix = scheduler.kv_manager.prefix
    check(prefix)
    for group, allocator in enumerate(scheduler.kv_manager.allocators):
        assert allocator.num_held == len(prefix.by_id[group]) == prefix.num_evictable(group)


def step(scheduler: Scheduler, token: int = 7, *, times: int = 1) -> Batch:
    """Steps, each read at once; the last one."""
    for _ in range(times):
        batch = try_step(scheduler, token)
        assert batch is not None
    return batch


def try_step(scheduler: Scheduler, token: int = 7) -> Batch | None:
    """One step, if something can run."""
    batch = None if scheduler.queues.idle else scheduler.next_batch()
    if batch is not None:
        scheduler.commit(batch, [token] * len(batch.sampling))
    return batch


def finish(scheduler: Scheduler) -> None:
    while not scheduler.queues.idle:
        step(scheduler)


def rows(batch: Batch) -> dict[str, int]:
    return {s.sequence.request.id: s.num_tokens for s in segments_of(batch)}


def test_decode_comes_first_and_prefill_is_chunked() -> None:
    scheduler = build()
    scheduler.queues.add(request("short", 3), max_output=8)
    assert rows(step(scheduler)) == {"short": 3}
    scheduler.queues.add(request("long", 20), max_output=8)
    assert rows(step(scheduler)) == {"short": 1, "long": 8}  # half a chunk while others run
    assert rows(step(scheduler)) == {"short": 1, "long": 8}
    assert rows(step(scheduler)) == {"short": 1, "long": 4}
    assert rows(step(scheduler)) == {"short": 1, "long": 1}


def test_alone_a_prompt_gets_whole_chunks() -> None:
    scheduler = build()
    scheduler.queues.add(request("long", 40), max_output=8)
    assert [rows(step(scheduler))["long"] for _ in range(4)] == [16, 16, 8, 1]


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    scheduler = build(chunk=32)
    scheduler.queues.add(request("long", 100), max_output=8)
    step(scheduler)
    scheduler.queues.add(request("short", 5), max_output=8)
    scheduler.queues.add(request("middle", 60), max_output=8)
    batch = step(scheduler)
    # the shortest is served whole, the oldest keeps a quarter of what is halved for others' sake
    assert rows(batch) == {"short": 5, "long": 4, "middle": 4}
    batch = step(scheduler)
    assert rows(batch) == {"short": 1, "long": 4, "middle": 12}
    assert [s.sequence.request.id for s in segments_of(batch)] == ["short", "long", "middle"]


def test_chunks_end_at_page_boundaries() -> None:
    scheduler = build(chunk=16)
    scheduler.queues.add(request("a", 30), max_output=1)
    scheduler.queues.add(request("b", 30), max_output=1)
    while not scheduler.queues.idle:
        for segment in segments_of(step(scheduler)):
            ends_prompt = segment.stop >= segment.sequence.num_prompt
            assert ends_prompt or segment.stop % PAGE == 0


def test_tails_are_sealed_all_at_once() -> None:
    scheduler = build(pages=64)
    for name in "ab":
        scheduler.queues.add(request(name, 3, 60), max_output=60)
    sealed = [len(step(scheduler).cache_work.seal) for _ in range(30)]
    assert set(sealed) == {0, 2}  # at a barrier every sequence seals
    first, second = [i for i, count in enumerate(sealed) if count][:2]
    assert second - first >= PAGE  # and barriers are a page apart at least


def test_the_youngest_is_preempted_and_resumes() -> None:
    scheduler = build(pages=6, max_batch=2)
    old = scheduler.queues.add(request("old", 8, 12), max_output=12)
    young = scheduler.queues.add(request("young", 8, 12), max_output=12)
    preempted = False
    while not scheduler.queues.idle:
        step(scheduler)
        preempted |= young.slot < 0 and not young.finished
        assert old.num_preempted == 0
    assert preempted
    assert young.num_preempted >= 1
    assert young.token_ids[8:] == [7] * 12
    assert_only_cached(scheduler)


def test_preemption_before_the_first_step_seals_no_tail() -> None:
    scheduler = build()
    sequence = scheduler.queues.add(request("a", 6), max_output=8)
    step(scheduler)
    scheduler.queues.preempt(sequence)
    assert scheduler.queues.admit([], 1) is sequence
    assert sequence.num_computed % PAGE, "a cut page, not copied yet"
    scheduler.kv_manager.take_work()
    scheduler.queues.preempt(sequence)
    assert scheduler.kv_manager.take_work().seal == [], "its tail holds what another sequence wrote"
    assert_only_cached(scheduler)


def test_no_request_overtakes_a_preempted_one_with_a_token_in_flight() -> None:
    scheduler = build(max_batch=1)
    first = scheduler.queues.add(request("first", 8), max_output=8)
    step(scheduler)
    in_flight = scheduler.next_batch()
    assert in_flight is not None
    scheduler.queues.preempt(first)
    scheduler.queues.add(request("second", 8), max_output=8)
    assert scheduler.next_batch() is None
    scheduler.commit(in_flight, [7])
    assert list(rows(step(scheduler))) == ["first"]


def test_a_prompt_waits_for_whole_pages_that_another_computes_and_no_longer() -> None:
    scheduler = build(chunk=4 * PAGE)
    shared = 4 * PAGE + 1  # the last one lies in a page that cannot be shared in time
    first = scheduler.queues.add(request("a", 12 * PAGE, shared=shared), max_output=8)
    scheduler.queues.add(request("b", 12 * PAGE, shared=shared), max_output=8)
    assert rows(step(scheduler)) == {"a": 4 * PAGE}
    assert set(rows(step(scheduler))) == {"a", "b"}
    while not first.decodes:
        step(scheduler)
    assert first.sharers == {}, "no sequence waits for it any more"
    scheduler = build(chunk=4 * PAGE)
    scheduler.queues.add(request("a", 12 * PAGE, shared=12 * PAGE), max_output=8)
    step(scheduler)
    asks_logits = request("c", 12 * PAGE, shared=12 * PAGE)
    asks_logits.prompt_logits = True  # it computes all of its prompt, whatever there is
    scheduler.queues.add(asks_logits, max_output=8)
    assert "c" in rows(step(scheduler))


def test_long_prompts_that_wait_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counting(a: list[int], b: list[int]) -> int:
        nonlocal compared
        compared += 1
        return common_length(a, b)

    monkeypatch.setattr(kv_manager, "common_length", counting)
    scheduler = build(pages=400, chunk=2 * PAGE)
    for i in range(30):
        scheduler.queues.add(request(str(i), 100 * PAGE, shared=90 * PAGE), max_output=8)
    step(scheduler, times=50)
    assert compared == 29


def test_min_tokens_delays_the_end_token() -> None:
    scheduler = build()
    params = SamplingParams(max_tokens=9, min_tokens=2)
    scheduler.queues.add(Request("a", [1], params, stop_ids=frozenset({7})), max_output=9)
    ended = [commit_sevens(scheduler).finished for _ in range(3)]
    assert ended == [{}, {}, {0: FinishReason.STOP}]


def commit_sevens(scheduler: Scheduler) -> CommitResult:
    batch = scheduler.next_batch()
    return scheduler.commit(batch, [7] * len(batch.sampling))
