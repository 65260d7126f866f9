"""Keys and values in one vector attend as they do in vectors of their own, in every format."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache.formats import Bits, lay_out, token_bytes
from mlxinfer.cache.groups import AttentionWindow
from mlxinfer.cache.inputs import QuerySegment, step_segments
from mlxinfer.cache.joint import JointPool
from mlxinfer.cache.pages import PageTable
from mlxinfer.cache.plain_attention import PlainPlanner
from mlxinfer.cache.pool import LayerPool
from mlxinfer.cache.step import StepKV, plan_group
from mlxinfer.config import KVOptions
from mlxinfer.core import KVSpec
from mlxinfer.metal_kernels.paged_attention import Softmax

PAGE, HEADS, GROUP, DIM = 16, 2, 3, 64
SPEC = KVSpec(HEADS, DIM, DIM, turning=16)
LENGTHS, QUERIES = (37, 50, 5), (1, 20, 3)
PAGES = ([6, 1, 4], [0, 3, 8, 9, 10], [5])


@dataclass
class Tokens:
    row: int
    start: int
    num_tokens: int
    sealed: int
    slot: int
    tables: list[PageTable]

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def vectors(count: int, heads: int, seed: int) -> mx.array:
    shape = (count, heads, DIM)
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def keys_and_values(count: int, seed: int) -> tuple[mx.array, mx.array]:
    """Keys (T, H, D) that are their values but for the numbers that turn."""
    values, others = vectors(count, HEADS, seed), vectors(count, HEADS, seed + 1)
    turns = mx.arange(DIM) % (DIM // 2) < SPEC.turning // 2
    return mx.where(turns, others, values), values


def step(
    pool: LayerPool | JointPool, short: list[QuerySegment], long: list[QuerySegment], seed: int
) -> mx.array:
    segments = step_segments(short, long)
    planner = PlainPlanner(0, AttentionWindow(), PAGE, token_bytes=1 << 20)
    plan = plan_group(segments, group=0, window=AttentionWindow(), page_size=PAGE, planner=planner)
    count = len(segments.positions)
    queries = vectors(count, HEADS * GROUP, seed + 2)
    outputs = StepKV(pool, plan).attend(queries, *keys_and_values(count, seed), Softmax(0.125))
    mx.eval(outputs, pool.arrays())
    return outputs


def attended(pool: LayerPool | JointPool) -> list[mx.array]:
    """What prompts see, then a step of one token, a chunk and three tokens."""
    tables = [PageTable(PAGE, pages=list(pages)) for pages in PAGES]
    found = [
        step(pool, [], [Tokens(0, 0, length, 0, slot, [table])], seed=slot)
        for slot, (table, length) in enumerate(zip(tables, LENGTHS, strict=True))
    ]
    segments = [
        Tokens(row, length, count, length - length % PAGE, slot, [table])
        for slot, (table, row, length, count) in enumerate(
            zip(tables, (0, 4, 1), LENGTHS, QUERIES, strict=True)
        )
    ]
    return [*found, step(pool, [segments[0], segments[2]], [segments[1]], seed=9)]


def num_bytes(pool: LayerPool | JointPool) -> int:
    return sum(array.nbytes for array in pool.arrays())


@pytest.mark.parametrize("bits", [(None, None), (8, 8), (4, 4)])
def test_attends_as_keys_and_values_apart(bits: Bits) -> None:
    sizes: dict[str, Any] = {
        "page_size": PAGE,
        "num_pages": 11,
        "num_slots": 3,
        "dtype": mx.float32,
    }
    joint = JointPool(SPEC, **sizes, bits=bits)
    apart = LayerPool(replace(SPEC, turning=0), **sizes, bits=bits)
    worst = {None: 1e-5, 8: 0.01, 4: 0.15}[bits[0]]  # of the mean: codes are of other groups
    for ours, theirs in zip(attended(joint), attended(apart), strict=True):
        off = np.abs(np.array(ours) - np.array(theirs))
        assert off.mean() <= worst
        assert off.max() <= 8 * worst
    assert num_bytes(joint) <= 0.67 * num_bytes(apart)


def test_a_token_takes_80_numbers_of_128() -> None:
    assert SPEC.numbers == HEADS * 80
    assert token_bytes(SPEC, mx.bfloat16, (None, None)) == HEADS * 80 * 2
    assert token_bytes(SPEC, mx.bfloat16, (8, 8)) == HEADS * (80 + 2 * 2 * 2)


@pytest.mark.parametrize(
    ("bits", "turning", "kept"),
    [
        ((None, None), 12, True),
        ((8, 8), 16, True),
        ((8, 8), 12, False),
        ((8, 4), 16, False),
        ((4, 4), 16, True),
        ((4, 4), 24, False),
    ],
)
def test_one_format_holds_both_or_they_are_apart(bits: Bits, turning: int, kept: bool) -> None:
    [spec], _ = lay_out([replace(SPEC, turning=turning)], KVOptions(bits=bits), key_bias=False)
    assert spec == replace(SPEC, turning=turning if kept else 0)
