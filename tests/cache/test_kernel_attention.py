"""One plan serves all layers of a group, each with its own heads, scale and sinks."""

import mlx.core as mx
import numpy as np
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.cache.groups import AttentionWindow
from mlxinfer.cache.inputs import Segments, ints
from mlxinfer.cache.kernel_attention import KernelPlan, KernelPlanner
from mlxinfer.cache.pages import PageTable
from mlxinfer.cache.pool import LayerPool
from mlxinfer.core import KVSpec
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.paged_attention import Softmax

PAGE, KV_HEADS, DIM = 16, 2, 64
LAYERS = [(4, 0.125, False), (8, 0.125, False), (4, 0.5, False), (4, 0.125, True)]


def spans() -> Segments:
    """Two sequences in decode: of 21 and of 7 tokens."""
    tables = [[PageTable(PAGE, pages=[2, 0])], [PageTable(PAGE, pages=[1])]]
    counts = ints([1, 1])
    return Segments(tables, ints([0, 1]), ints([20, 6]), counts, ints([16, 0]), ints([1, 0]), 1)


def planned(short: Segments) -> KernelPlan:
    [(_, plan)] = KernelPlanner(0, AttentionWindow(), PAGE, kv_heads=KV_HEADS)(short, 2)
    assert isinstance(plan, KernelPlan)
    return plan


def filled_pool() -> LayerPool:
    spec = KVSpec(KV_HEADS, DIM, DIM)
    pool = LayerPool(spec, page_size=PAGE, num_pages=3, num_slots=2, dtype=mx.float32)
    rng = np.random.default_rng(1)
    for plane in (pool.keys, pool.values):
        for arrays in (plane.pages, plane.tails):
            noise = rng.standard_normal(arrays[0].shape, dtype=np.float32)
            arrays[:] = [mx.array(noise)]
    return pool


@requires_compiler
def test_layers_that_differ_share_a_plan_and_no_launch() -> None:
    pool, shared = filled_pool(), planned(spans())
    rng = np.random.default_rng(2)
    machine = MetalCPU()
    with running_on(machine):
        for heads, scale, has_sinks in LAYERS:
            queries = mx.array(rng.standard_normal((2, heads, DIM), dtype=np.float32))
            sinks = mx.linspace(-1, 1, heads) if has_sinks else None
            found, expected = (
                plan.attend(pool, queries, Softmax(scale, sinks))
                for plan in (shared, planned(spans()))
            )
            assert found.shape == (2, heads * DIM)
            assert mx.array_equal(found, expected)
    machine.assert_clean()
