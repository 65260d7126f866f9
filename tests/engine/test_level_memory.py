"""An hour of mixed traffic in simulated time: the bookkeeping of the scheduler does not grow."""

import gc
import random
from collections import Counter

import pytest
from engine.test_prefill_slices import PAGE, Bench

from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.kv_manager import KVManager
from mlxinfer.engine.scheduler import Scheduler

HOUR_S, EVERY_S = 3600.0, 2.0  # of traffic; between two requests, on average
NUM_PAGES = 300


def busy_bench() -> Bench:
    """A scheduler with a prefix cache that is full after some minutes."""
    bench = Bench("M4 Max", "35B-A3B")
    allocator = PageAllocator(NUM_PAGES)
    group = PageGroup(AttentionWindow(), allocator, PAGE, bench.chunk, page_bytes=1)
    bench.scheduler = Scheduler(
        KVManager([group], reuse=True),
        max_batch=16,
        prefill_chunk=bench.chunk,
        prefill_slice_s=bench.slice_s,
    )
    return bench


def arrive(bench: Bench, rng: random.Random, number: int) -> None:
    """One request: a question, a document or a conversation that goes on; some are cancelled."""
    length = rng.choice([30, 200, 1500, 4000])
    seed = rng.randrange(20) if rng.random() < 0.5 else number
    ids = [(1000 * seed + i) % 50_000 for i in range(length)]
    max_tokens = rng.choice([1, 40, 300])
    request = Request(str(number), ids, SamplingParams(max_tokens=max_tokens))
    bench.token_s[request.id] = []
    bench.scheduler.queues.add(request, max_output=max_tokens)
    if rng.random() < 0.1:
        running = rng.choice(bench.scheduler.queues.unfinished())
        bench.scheduler.queues.finish(running)


def objects() -> Counter[str]:
    """What the collector knows, by type."""
    gc.collect()
    return Counter(type(object_).__name__ for object_ in gc.get_objects())


@pytest.mark.slow
def test_an_hour_of_mixed_traffic_leaves_no_more_than_half_of_it() -> None:
    bench, rng, number, next_s = busy_bench(), random.Random(1), 0, 0.0
    counts: list[Counter[str]] = []
    while bench.now_s < HOUR_S:
        if bench.now_s >= next_s:
            arrive(bench, rng, number)
            number += 1
            next_s += rng.expovariate(1 / EVERY_S)
        if bench.scheduler.queues.idle:
            bench.now_s = next_s
        else:
            bench.step()
        if bench.now_s >= HOUR_S / 2 * (len(counts) + 1):
            bench.sizes.clear()
            unfinished = {s.request.id for s in bench.scheduler.queues.unfinished()}
            bench.token_s = {name: bench.token_s[name] for name in unfinished}
            counts.append(objects())
    middle, end = counts
    grown = {kind: end[kind] - middle[kind] for kind in end if end[kind] > middle[kind] + 50}
    print(f"{number} requests, {bench.scheduler.counters.steps} steps, grown: {grown}")
    assert number > 800
    assert bench.scheduler.counters.preemptions > 0
    assert sum(end.values()) < 1.02 * sum(middle.values()), grown
