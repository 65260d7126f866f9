"""One plan serves all layers of a group, each with its own heads, scale and sinks."""

import mlx.core as mx
import numpy as np
from cache.cache_layers import PAGE, fill, layer_of
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.cache.attention import OnMetal, kernel_part
from mlxinfer.cache.inputs import Segments, StepMetadata, ints
from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup, PageTable
from mlxinfer.cache_specs import KVSpec
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.paged_attention import Softmax

KV_HEADS, DIM = 2, 64
LAYERS = [(4, 0.125, False), (8, 0.125, False), (4, 0.5, False), (4, 0.125, True)]


def spans() -> Segments:
    """Two sequences in decode: of 21 and of 7 tokens."""
    tables = [[PageTable(PAGE, pages=[2, 0])], [PageTable(PAGE, pages=[1])]]
    counts = ints([1, 1])
    return Segments(tables, ints([0, 1]), ints([20, 6]), counts, ints([16, 0]), ints([1, 0]), 1)


def planned(short: Segments) -> OnMetal:
    group = PageGroup(AttentionWindow(), PageAllocator(1), PAGE, 64, 1)
    return kernel_part(short, StepMetadata([short], [], short.starts), group)


@requires_compiler
def test_layers_that_differ_share_a_plan_and_no_launch() -> None:
    layer, shared = layer_of(KVSpec(KV_HEADS, DIM, DIM), num_pages=3, num_slots=2), planned(spans())
    fill(layer, seed=1)
    rng = np.random.default_rng(2)
    machine = MetalCPU()
    with running_on(machine):
        for heads, scale, has_sinks in LAYERS:
            queries = mx.array(rng.standard_normal((2, heads, DIM), dtype=np.float32))
            sinks = mx.linspace(-1, 1, heads) if has_sinks else None
            attended, expected = (
                plan.attend(layer, queries, Softmax(scale, sinks))
                for plan in (shared, planned(spans()))
            )
            assert attended.shape == (2, heads * DIM)
            assert mx.array_equal(attended, expected)
    machine.assert_clean()
