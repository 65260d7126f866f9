"""`bench lookup`: CPU time of the prefix cache for a long prompt that it has as a whole.

A first lookup names all pages, and later ones know the names. Nothing is computed, so this is what
a cached prompt costs beside the model.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.tables import Figures
from mlxinfer.bench.report import Report, Table
from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.cache.prefix import PrefixCache

PAGE = 16
WINDOWS: dict[str, list[int | None]] = {"full": [None], "full and window": [None, 1024]}


def filled(windows: Sequence[int | None], token_ids: list[int]) -> PrefixCache:
    """A cache that has every whole page of a prompt."""
    num_pages = len(token_ids) // PAGE
    groups = [
        PageGroup(AttentionWindow(window), PageAllocator(num_pages), PAGE, PAGE, 1)
        for window in windows
    ]
    cache = PrefixCache(groups)
    names = cache.names(None, token_ids)
    lease = cache.lock(cache.probe(names, limit=0))
    for table, allocator in zip(lease.tables, cache.allocators, strict=True):
        table.append(allocator.allocate(num_pages))
    cache.extend(lease, names, num_pages * PAGE)
    cache.release(lease)
    return cache


def quickest_ms(runs: int, work: Callable[[], object]) -> float:
    """CPU milliseconds of the quickest of several runs."""
    times = []
    for _ in range(runs):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return 1000 * min(times)


def cost(windows: Sequence[int | None], num_tokens: int, runs: int) -> Figures:
    """CPU milliseconds for a prompt of `num_tokens` and one more."""
    token_ids = random.Random(0).choices(range(150_000), k=num_tokens + 1)
    cache = filled(windows, token_ids)
    known = cache.names(None, token_ids)
    assert cache.probe(known).num_tokens == num_tokens
    return {
        "first_ms": quickest_ms(runs, lambda: cache.probe(cache.names(None, token_ids))),
        "later_ms": quickest_ms(runs, partial(cache.probe, known)),
        "lease_ms": quickest_ms(runs, lambda: cache.release(cache.lock(cache.probe(known)))),
    }


def run(*, tokens: Sequence[int], runs: int) -> Report:
    """Measure prompts of several lengths."""
    measured = [
        (layers, count, cost(windows, count, runs))
        for layers, windows in WINDOWS.items()
        for count in tokens
    ]
    rows = [
        [layers, f"{count:,}", *[f"{cell:.2f}" for cell in figures.values()]]
        for layers, count, figures in measured
    ]
    table = Table(
        "CPU ms of a prompt that the prefix cache has",
        ["attention", "tokens", "first lookup", "later lookup", "and lease"],
        rows,
        "A first lookup hashes each page once. Lease: a lookup, its pages taken and given back.",
    )
    data = [
        {"attention": layers, "tokens": count, **figures} for layers, count, figures in measured
    ]
    return Report("lookup", [table], {"lookup": data})
