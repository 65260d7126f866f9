"""The kernels on the pools and page tables of a real step give what the step's attention gives."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.cache.formats import Bits
from mlxinfer.cache.groups import AttentionWindow
from mlxinfer.cache.inputs import QuerySegment, step_segments
from mlxinfer.cache.pages import PageTable
from mlxinfer.cache.plain_attention import PlainPlanner
from mlxinfer.cache.pool import LayerPool
from mlxinfer.cache.step import StepKV, padded_positions, plan_group
from mlxinfer.core import KVSpec
from mlxinfer.metal_kernels.attention_plan import AttentionPlanner, page_table
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.paged_attention import Softmax
from mlxinfer.metal_kernels.paged_attention_kernel import paged_attention_on_metal

PAGE, HEADS, GROUP, DIM = 16, 2, 3, 64
LENGTHS = (37, 20, 5)  # before the step
QUERIES = (1, 1, 3)
PAGES = ([6, 1, 4], [0, 3], [5])


@dataclass
class Tokens:
    row: int
    start: int
    num_tokens: int
    sealed: int
    slot: int
    tables: list[PageTable] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def numbers(table: PageTable, sealed: int) -> np.ndarray:
    gap = [-1] * (table.first - table.num_kept)
    pages = [*table.kept, *gap, *table.pages][: sealed // PAGE]
    return np.array(pages, np.int32)


def vectors(count: int, heads: int, seed: int) -> mx.array:
    shape = (count, heads, DIM)
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@requires_compiler
@pytest.mark.parametrize("bits", [(None, None), (8, 4), (4, 4)])
@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow(size=18, sinks=3)])
def test_same_as_the_step(bits: Bits, window: AttentionWindow) -> None:
    spec = KVSpec(HEADS, DIM, DIM, window.size, window.sinks)
    pool = LayerPool(spec, page_size=PAGE, num_pages=7, num_slots=4, dtype=mx.float32, bits=bits)
    kept = window.kept_pages(PAGE)
    tables = [PageTable(PAGE, kept, kept, pages[:kept], pages[kept:]) for pages in PAGES]
    for slot, (length, table) in enumerate(zip(LENGTHS, tables, strict=True)):
        prompt = Tokens(0, 0, length, 0, slot, [table])
        attend(pool, [], [prompt], window, seed=slot)
        table.drop_before(window.first_page(length, PAGE))

    rows = np.cumsum(QUERIES) - QUERIES
    spans = [
        Tokens(int(row), length, count, length - length % PAGE, slot, [table])
        for slot, (row, length, count, table) in enumerate(
            zip(rows, LENGTHS, QUERIES, tables, strict=True)
        )
    ]
    queries, expected = attend(pool, spans, [], window, seed=9)
    queries, _ = pool.encode(queries, queries[:, :HEADS], queries[:, :HEADS])
    machine = MetalCPU()
    found = []
    with running_on(machine):
        for short in step_segments(spans, []).short:
            first, count = int(short.rows[0]), int(short.counts.sum())
            planner = AttentionPlanner(
                counts=short.counts,
                sealed=short.sealed,
                slots=short.slots,
                page_size=PAGE,
                kv_heads=HEADS,
                window=window.size,
                sinks=window.sinks,
            )
            pages = page_table(
                [
                    numbers(tables[0], sealed)
                    for tables, sealed in zip(short.tables, short.sealed.tolist(), strict=True)
                ]
            )
            plan = planner(short.starts, pages)
            own = queries[first : first + count]
            found.append(
                paged_attention_on_metal(own, pool.keys, pool.values, plan, scale=0.125)[0]
            )
    machine.assert_clean()
    assert mx.allclose(mx.concatenate(found).flatten(1), expected, rtol=1e-5, atol=1e-5).item()


def attend(
    pool: LayerPool,
    short: list[QuerySegment],
    long: list[QuerySegment],
    window: AttentionWindow,
    seed: int,
) -> tuple[mx.array, mx.array]:
    """Queries of a step, and what its attention gives."""
    count = sum(span.num_tokens for span in (*short, *long))
    planner = PlainPlanner(0, window, PAGE, token_bytes=1 << 20)
    spans = step_segments(short, long)
    plan = plan_group(
        spans,
        group=0,
        window=window,
        page_size=PAGE,
        planner=planner,
        positions=padded_positions(spans.positions),
    )
    queries = vectors(count, HEADS * GROUP, seed)
    keys, values = vectors(count, HEADS, seed + 20), vectors(count, HEADS, seed + 40)
    outputs = StepKV(pool, plan).attend(queries, keys, values, Softmax(0.125))
    mx.eval(outputs, pool.arrays())
    return queries, outputs
