"""Prompts in tiles: the kernel against its twin, on a machine that sees every access."""

import mlx.core as mx
import numpy as np
import pytest
from attention_checks import check_scene, moved
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every
from scenes import Scene, build

from mlxinfer.metal_kernels.attention_plan import MAX_PARTIAL_BYTES, AttentionPlanner, prefill_shape
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.paged_attention import Softmax, paged_attention_on_metal

D256 = {"key_dim": 256, "value_dim": 256, "prefill": True}
SCENES = {
    "two ragged chunks": Scene([70, 50], [40, 50], kv_heads=2, group=2, dtype=mx.bfloat16, **D256),
    "window": Scene([150], [90], group=4, window=40, sinks=3, dtype=mx.bfloat16, **D256),
    "codes of 8 and 4 bits": Scene([60], [40], group=4, bits=(8, 4), **D256),
    "192 and 128": Scene([60], [60], group=3, key_dim=192, value_dim=128, prefill=True),
    "64, split": Scene([200], [30], group=2, item_blocks=1, prefill=True),
    "keys in values": Scene([60], [40], kv_heads=2, group=2, bits=(8, 8), rope_dims=64, **D256),
    "512, keys in values": Scene(
        [40], [20], kv_heads=2, group=2, key_dim=512, value_dim=512, rope_dims=128, prefill=True
    ),
    "512": Scene([40], [20], group=2, key_dim=512, value_dim=512, prefill=True),
}


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(2, SCENES))
def test_same_as_the_twin(name: str) -> None:
    check_scene(
        SCENES[name], sinks=name != "512", soft_cap=5.0 if "split" in name else None, seed=1
    )


TRAFFIC = {
    "256, GQA 4": Scene([150], [70], group=4, dtype=mx.bfloat16, **D256),
    "256, 8 bits": Scene([300], [64], group=4, bits=(8, 8), **D256),
    "256, 4 bits": Scene([300], [64], group=4, bits=(4, 4), **D256),
    "128, GQA 2": Scene([300], [128], group=2, key_dim=128, value_dim=128, prefill=True),
}


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(2, TRAFFIC))
def test_keys_and_values_are_read_once_a_tile(name: str) -> None:
    scene = TRAFFIC[name]
    shape = prefill_shape(key_dim=scene.key_dim, value_dim=scene.value_dim)
    num_tiles = -(-scene.queries[0] * scene.group // shape.rows)
    traffic = moved(scene)
    assert traffic.requested <= 1.1 * num_tiles
    assert traffic.dequantised is None or traffic.dequantised <= num_tiles


@requires_compiler
def test_one_launch_and_nothing_beside_its_outputs() -> None:
    """Two ragged chunks: no gather, no score matrix, no partials; the plan is what it costs."""
    inputs = build(Scene([150, 90], [40, 30], kv_heads=2, group=2, **D256))
    machine = MetalCPU(checked=False)
    with running_on(machine):
        arguments = inputs.queries, inputs.keys, inputs.values, inputs.plan
        outputs = paged_attention_on_metal(*arguments, Softmax(0.1))
    assert [report.kernel for report in machine.reports] == ["tiled_attention"]
    assert [array.shape for array in outputs] == [inputs.queries.shape]
    assert inputs.plan.numbers.nbytes + inputs.plan.pages.nbytes < 4_096


@pytest.mark.parametrize("context", [1_000, 30_000, 250_000])
@pytest.mark.parametrize("counts", [[16], [40, 9], [2_048]])
def test_partials_stay_within_two_megabytes(context: int, counts: list[int]) -> None:
    """4 KV heads of 256 numbers, 64 rows a tile, 40 cores."""
    rows, heads, dim = 64, 4, 256
    count = np.array(counts, np.int32)
    starts = np.full(len(counts), context, np.int32)
    pages = mx.zeros((len(counts), context // 16 + 200), mx.int32)
    item_bytes = heads * rows * (dim + 2) * 4
    planner = AttentionPlanner(
        counts=count,
        sealed=-(-(starts + count) // 16) * 16,
        slots=count,
        page_size=16,
        kv_heads=heads,
        cores=40,
        tile_queries=16,
        partial_bytes=item_bytes,
    )
    plan = planner(starts, pages)
    partial_bytes = plan.num_items * item_bytes if plan.is_split else 0
    assert partial_bytes <= MAX_PARTIAL_BYTES == 2 << 20
    assert plan.is_split == (counts == [16])
