"""The kernels on the layers and page tables of a real step give what the step's attention gives."""

import mlx.core as mx
import numpy as np
import pytest
from cache.layers import PAGE, Bits, Tokens, layer_of, prepare
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.cache.groups import AttentionWindow
from mlxinfer.cache.inputs import QuerySegment, step_metadata
from mlxinfer.cache.keys_values import KeyValueLayer
from mlxinfer.cache.pages import PageTable
from mlxinfer.core import KVSpec
from mlxinfer.metal_kernels.attention_plan import AttentionPlanner, page_table
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.paged_attention import Softmax
from mlxinfer.metal_kernels.paged_attention_kernel import paged_attention_on_metal

HEADS, GROUP, DIM = 2, 3, 64
LENGTHS = (37, 20, 5)  # before the step
QUERIES = (1, 1, 3)
PAGES = ([6, 1, 4], [0, 3], [5])


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
    layer = layer_of(spec, bits, num_pages=7, num_slots=4)
    kept = window.kept_pages(PAGE)
    tables = [PageTable(PAGE, kept, kept, pages[:kept], pages[kept:]) for pages in PAGES]
    for slot, (length, table) in enumerate(zip(LENGTHS, tables, strict=True)):
        prompt = Tokens(0, 0, length, 0, slot, [table])
        attend(layer, [], [prompt], window, seed=slot)
        table.drop_before(window.first_page(length, PAGE))

    rows = np.cumsum(QUERIES) - QUERIES
    spans = [
        Tokens(int(row), length, count, length - length % PAGE, slot, [table])
        for slot, (row, length, count, table) in enumerate(
            zip(rows, LENGTHS, QUERIES, tables, strict=True)
        )
    ]
    queries, expected = attend(layer, spans, [], window, seed=9)
    queries = layer.rotate(queries)
    machine = MetalCPU()
    found = []
    with running_on(machine):
        for short in step_metadata(spans, []).short:
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
                paged_attention_on_metal(own, layer.keys, layer.values, plan, scale=0.125)[0]
            )
    machine.assert_clean()
    assert mx.allclose(mx.concatenate(found).flatten(1), expected, rtol=1e-5, atol=1e-5).item()


def attend(
    layer: KeyValueLayer,
    short: list[QuerySegment],
    long: list[QuerySegment],
    window: AttentionWindow,
    seed: int,
) -> tuple[mx.array, mx.array]:
    """Queries of a step, and what its attention gives."""
    count = sum(span.num_tokens for span in (*short, *long))
    prepare(layer, step_metadata(short, long), window)
    queries = vectors(count, HEADS * GROUP, seed)
    keys, values = vectors(count, HEADS, seed + 20), vectors(count, HEADS, seed + 40)
    outputs = layer.attend(queries, keys, values, Softmax(0.125))
    mx.eval(outputs, layer.arrays())
    return queries, outputs
