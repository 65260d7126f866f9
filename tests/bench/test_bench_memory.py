import pytest

from tests.bench import memory
from tests.bench.bench_parts import check, model_of
from tests.bench.engines import OurEngine
from tests.bench.memory import (
    PAGE,
    TOKEN_BYTES,
    WIDE,
    change,
    decode,
    fill,
    settle,
    waste,
)


def engine(num_pages: int) -> OurEngine:
    return OurEngine(model_of(WIDE), num_pages=num_pages)


def test_steps_launched_ahead_do_not_copy_the_pool() -> None:
    ours = engine(2000)  # 131 MB
    (found,) = decode([ours], 4, 128, steps=2 * PAGE, rounds=1)
    pool = ours.loop.cache.bytes_allocated
    assert pool > 100e6
    assert found.extra_bytes < 0.1 * pool
    copied = ours.loop.cache.bytes_copied / ours.loop.scheduler.counters.steps
    assert copied <= ours.tail_bytes


def test_pages_hold_live_tokens_and_no_padding() -> None:
    found = waste(engine(300), [1500, 500, 10])
    assert found.live_bytes == 2010 * TOKEN_BYTES
    rounded = (94 + 32 + 1) * PAGE * TOKEN_BYTES
    assert found.rounded_bytes == rounded
    assert found.held_bytes - found.tail_bytes <= 1.05 * rounded


def test_coming_and_going_copies_nothing_of_the_others() -> None:
    ours = engine(600)
    found = change(ours, 5, 512)
    others = 5 * 512 * TOKEN_BYTES
    assert ours.loop.cache.bytes_grown == (0 + 4) * 2 * PAGE * TOKEN_BYTES  # tails, at the fill
    assert found.join_bytes - found.steady_bytes < 0.25 * others
    assert found.leave_bytes - found.steady_bytes < 0.25 * others


def test_settled_streams_have_sealed_pages() -> None:
    ours = engine(40)
    fill(ours, [20, 33])
    settle(ours)
    assert ours.loop.scheduler.counters.pages_sealed >= 2  # of each stream one


def test_memory_alone() -> None:
    report = memory.run(small=True, peer=False)
    check(report)
    assert set(report.data["held"]) == {"lengths", "mlxinfer"}


@pytest.mark.slow
def test_memory_beside_mlx_lm() -> None:
    report = memory.run(small=True)
    check(report)
    held = report.data["held"]
    assert held["mlxinfer"]["held_bytes"] < held["mlx-lm"]["held_bytes"]
    moved = report.data["join_and_leave"]
    assert moved["mlxinfer"]["join_bytes"] < moved["mlx-lm"]["join_bytes"]
