from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.pages import AttentionWindow
from mlxinfer.metal_kernels.attention_plan import (
    BLOCK,
    FEW_ITEM_BLOCKS,
    MIN_ITEM_BLOCKS,
    AttentionPlanner,
    Shape,
    blocks_per_item,
    most_rows,
    page_table,
    prefill_shape,
    registers,
    share_blocks,
    threadgroup_shape,
    visible_blocks,
)
from mlxinfer.metal_kernels.chips import cores_of

counts = st.lists(st.integers(1, 200), min_size=1, max_size=9)


@given(counts, st.integers(1, 64))
def test_items_take_every_block_once_and_equally(blocks: list[int], item_blocks: int) -> None:
    first_items, work = share_blocks(np.array(blocks, np.int32), item_blocks)
    ends = [*first_items[1:], len(work)]
    for sequence, (num, first, end) in enumerate(zip(blocks, first_items, ends, strict=True)):
        items = work[first:end]
        assert (items[:, 0] == sequence).all()
        taken = np.concatenate([np.arange(low, high) for low, high in items[:, 1:3]])
        assert taken.tolist() == list(range(num))
        sizes = items[:, 2] - items[:, 1]
        assert sizes.max() <= item_blocks
        assert sizes.max() - sizes.min() <= 1


@given(counts, st.sampled_from([1, 4, 8]), st.sampled_from([8, 40, 80]))
def test_enough_threadgroups_but_no_tiny_ones(blocks: list[int], kv_heads: int, cores: int) -> None:
    wanted = blocks_per_item(np.array(blocks, np.int32), kv_heads, cores)
    _, work = share_blocks(np.array(blocks, np.int32), wanted)
    assert wanted >= FEW_ITEM_BLOCKS
    if wanted > MIN_ITEM_BLOCKS:
        assert len(work) * kv_heads <= (8 * cores + len(blocks)) * kv_heads
        assert len(work) * kv_heads >= sum(blocks) * kv_heads / wanted
    if wanted < MIN_ITEM_BLOCKS:
        assert wanted == FEW_ITEM_BLOCKS or len(work) * kv_heads >= 2 * cores


@pytest.mark.parametrize("tokens", [1_024, 1_536, 2_048])
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_a_short_context_alone_keeps_40_cores_busy(tokens: int, kv_heads: int) -> None:
    blocks = np.array([tokens // BLOCK], np.int32)
    items = len(share_blocks(blocks, blocks_per_item(blocks, kv_heads, 40))[1])
    assert items * kv_heads >= 2 * 40
    before = -(-int(blocks[0]) // MIN_ITEM_BLOCKS)  # without a finer split
    assert before * kv_heads < 2 * 40


def test_cores_by_name_else_by_family() -> None:
    assert cores_of("Apple M3 Ultra", "applegpu_g15d") == 80
    assert cores_of("Apple M9 Max", "applegpu_g21s") == 40
    assert cores_of("Apple M9", "applegpu_g21g") == 20
    assert cores_of("", "") == 20


def test_a_long_sequence_is_split_and_a_full_batch_is_not() -> None:
    alone, batch = np.array([2048], np.int32), np.full(64, 128, np.int32)
    assert len(share_blocks(alone, blocks_per_item(alone, 8, 40))[1]) == 40
    assert len(share_blocks(batch, blocks_per_item(batch, 8, 40))[1]) == 64


@given(st.integers(0, 300), st.integers(1, 8), st.none() | st.integers(1, 120), st.integers(0, 40))
def test_blocks_hold_all_seen(start: int, queries: int, window: int | None, sinks: int) -> None:
    seen_by = AttentionWindow(window, sinks if window is not None else 0)
    stop = start + queries
    sink_blocks, gap, num_blocks = (
        int(field[0])
        for field in visible_blocks(
            np.array([start], np.int32), np.array([stop], np.int32), seen_by.size, seen_by.sinks
        )
    )
    blocks = [i if i < sink_blocks else i + gap for i in range(num_blocks)]
    seen = seen_by.sees(np.arange(start, stop, dtype=np.int32)[:, None], np.arange(stop)[None])
    assert blocks == np.unique(np.flatnonzero(seen.any(axis=0)) // BLOCK).tolist()


def test_short_arrays_are_padded_to_one_address_space() -> None:
    ones = np.ones(1, np.int32)
    planner = AttentionPlanner(
        counts=ones, sealed=0 * ones, slots=0 * ones, page_size=16, kv_heads=1
    )
    plan = planner(0 * ones, page_table([np.zeros(0, np.int32)]))
    assert min(plan.numbers.size, plan.pages.size) >= 8
    assert not plan.is_split


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5)), min_size=1, max_size=4),
    st.none() | st.integers(1, 60),
    st.integers(0, 20),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_a_planner_that_was_used_plans_as_a_new_one(
    draws: list[tuple[int, int]], window: int | None, sinks: int, moves: list[int]
) -> None:
    counts, pages = (np.array(column, np.int32) for column in zip(*draws, strict=True))

    def new() -> AttentionPlanner:
        return AttentionPlanner(
            counts=counts,
            sealed=pages * 16,
            slots=np.arange(len(counts), dtype=np.int32)[::-1].copy(),
            page_size=16,
            kv_heads=2,
            window=window,
            sinks=0 if window is None else sinks,
            item_blocks=2,
        )

    used, starts = new(), pages * 16
    for move in moves:
        starts = starts + np.int32(move)
        table = page_table([np.arange(count + move, dtype=np.int32) for count in pages])
        actual, expected = used(starts, table), new()(starts, table)
        assert np.array_equal(actual.numbers, expected.numbers)
        assert actual[2:] == expected[2:]


# Of one core of the smallest chip: 448 threads had 110 registers each, and none had more than 128.
REGISTERS, MOST_REGISTERS = 448 * 110, 128


def assert_fits(shape: Shape, dim: int, itemsize: int, *, codes: bool = False) -> None:
    sizes = {"key_dim": dim, "value_dim": dim}
    assert shape.threads <= 512
    assert shape.fragments * dim // 4 // shape.halves <= 64
    if itemsize == 2:  # queries in 32 bits spill where head dims are large
        needed = registers(shape, **sizes, itemsize=itemsize, codes=codes)
        assert needed <= MOST_REGISTERS, (shape, dim, needed)
        assert needed * shape.threads <= REGISTERS, (shape, dim, needed)


def test_threadgroups_have_registers_and_threads_enough() -> None:
    stored = (2, False), (2, True), (4, False)
    for dim, (itemsize, codes) in product((64, 80, 96, 112, 128, 192, 256, 512), stored):
        sizes = {"key_dim": dim, "value_dim": dim}
        for rows in range(1, 129):
            shape = threadgroup_shape(rows, **sizes, itemsize=4 if codes else itemsize)
            num_blocks = -(-rows // most_rows(dim, dim))
            assert (num_blocks - 1) * shape.rows < rows <= num_blocks * shape.rows
            assert_fits(shape, dim, itemsize, codes=codes)
        assert_fits(prefill_shape(**sizes), dim, itemsize)
