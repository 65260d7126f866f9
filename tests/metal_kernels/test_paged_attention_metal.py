from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from attention_checks import check_scene
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every
from scenes import Scene, build

from mlxinfer.metal_kernels.attention_plan import AttentionPlan, AttentionPlanner
from mlxinfer.metal_kernels.paged_attention import (
    Softmax,
    paged_attention_gathered,
    paged_attention_on_metal,
)

D128 = {"key_dim": 128, "value_dim": 128}

# Scenes that share compiled kernels stand together: lengths, batch, window and group are no part
# of them.
SCENES = {
    "one token": Scene([1], [1]),
    "one page": Scene([16], [1]),
    "ragged": Scene([15, 17, 33, 48, 1], [1] * 5, kv_heads=2, group=4),
    "batch of 9": Scene(list(range(30, 39)), [1] * 9, group=8),
    "window": Scene([100, 40], [1, 1], group=3, window=20),
    "window and sinks": Scene([100, 300], [1, 1], group=3, window=20, sinks=18),
    "three rows": Scene([100, 40], [3, 2], kv_heads=2, group=2, window=33, sinks=1),
    "large pages": Scene([100, 70, 31], [1, 2, 1], page_size=32, window=40),
}
SPLIT = {
    "at a boundary": Scene([64, 65, 63], [1, 1, 1], group=4, item_blocks=2),
    "window and sinks": Scene([400], [2], group=4, item_blocks=2, window=150, sinks=4),
    "one row": Scene([40], [1], item_blocks=2),
    "uneven rows": Scene([97, 20], [2, 1], group=3, item_blocks=1),
}
FORMATS = {
    "8": Scene([70, 18], [1, 1], group=4, bits=(8, 8), **D128),
    "4": Scene([70, 18], [1, 1], group=4, bits=(4, 4), **D128),
    "8 and 4, bfloat16": Scene([70, 18], [1, 1], group=8, bits=(8, 4), dtype=mx.bfloat16),
    "plain keys": Scene([50], [1], group=4, bits=(None, 8), dtype=mx.float32),
    "80": Scene([50], [1], group=8, bits=(8, 4), key_dim=80, value_dim=80),
    "96": Scene([50], [1], group=8, bits=(4, 8), key_dim=96, value_dim=96, dtype=mx.float32),
    "112": Scene([50], [1], group=8, key_dim=112, value_dim=112, dtype=mx.bfloat16),
    "192 and 128": Scene([50], [1], group=8, key_dim=192, value_dim=128),
    "256": Scene([50], [1], group=8, bits=(8, 8), key_dim=256, value_dim=256),
    "keys in values": Scene([50, 33], [1, 2], kv_heads=2, group=2, rope_dims=64, **D128),
    "keys in values, 4 bits": Scene([50], [1], group=8, bits=(4, 4), rope_dims=64, **D128),
}
SHARED = {
    "16 heads of 256": Scene([50], [1], group=16, key_dim=256, value_dim=256),
    "4 rows of 16 heads": Scene([50, 33], [4, 1], group=16, bits=(4, 8), window=30, **D128),
    "keys in values of 512": Scene(
        [50, 33], [1, 2], kv_heads=2, group=8, key_dim=512, value_dim=512, rope_dims=128
    ),
    "8 rows of 16 heads of 512": Scene(
        [40], [8], group=16, bits=(8, 4), key_dim=512, value_dim=512, dtype=mx.bfloat16
    ),
    "128 rows, float32": Scene([20], [8], group=16, key_dim=192, value_dim=192, dtype=mx.float32),
}


@requires_compiler
@pytest.mark.parametrize("name", SCENES)
def test_scenes_agree_with_the_twin(name: str) -> None:
    check_scene(SCENES[name], log_sums=True, seed=len(name))


@requires_compiler
@pytest.mark.parametrize("name", SPLIT)
def test_split_with_sink_logits_and_soft_cap(name: str) -> None:
    check_scene(SPLIT[name], sinks=True, soft_cap=5.0, log_sums=True)


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(2, FORMATS))
def test_formats_and_head_dims(name: str) -> None:
    check_scene(FORMATS[name], log_sums=True, seed=1)


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(2, SHARED))
def test_rows_that_share_tiles(name: str) -> None:
    check_scene(SHARED[name], sinks=True, log_sums=True, seed=2)


@requires_compiler
@pytest.mark.parametrize("bits", [(4, 4), pytest.param((8, 8), marks=pytest.mark.ci)])
def test_codes_are_multiplied_as_they_are(bits: tuple[int, int]) -> None:
    """A number that were dequantised would be NaN here."""
    scene = Scene([70, 18], [1, 1], group=4, bits=bits, window=40, **D128)
    inputs = build(scene)
    arguments = inputs.queries, inputs.keys, inputs.values, inputs.plan
    machine = MetalCPU(replace={"return code(i) * scale + bias;": "return NAN;"})
    [actual] = machine.clean(lambda: paged_attention_on_metal(*arguments, Softmax(0.1)))
    [expected] = paged_attention_gathered(*arguments, Softmax(0.1))
    assert mx.allclose(actual.astype(mx.float32), expected.astype(mx.float32), atol=4e-3).item()


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("group", "dim", "bits"), every(3, [(8, 128, (8, 8)), (2, 256, (4, 4)), (16, 64, (8, None))])
)
def test_rows_to_verify_are_computed_as_rows_to_decode(
    group: int, dim: int, bits: tuple[int, int | None]
) -> None:
    """Else near-ties would differ between answers with proposals and without."""
    scene = Scene(
        *([90], [8]), group=group, bits=bits, key_dim=dim, value_dim=dim, dtype=mx.bfloat16
    )
    inputs = build(scene)
    _, start, stop, sealed, slot, *_ = (int(field) for field in inputs.plan.spans[0])
    planner = AttentionPlanner(
        counts=np.array([1], np.int32),
        sealed=np.array([sealed], np.int32),
        slots=np.array([slot], np.int32),
        page_size=scene.page_size,
        kv_heads=1,
    )

    def attend(queries: mx.array, plan: AttentionPlan) -> mx.array:
        stored = inputs.keys, inputs.values
        run = partial(paged_attention_on_metal, softmax=Softmax(dim**-0.5), log_sums=True)
        return MetalCPU().clean(lambda: run(queries, *stored, plan))[1]

    together = attend(inputs.queries, inputs.plan)
    for row in (0, stop - start - 1):
        alone = attend(
            inputs.queries[row : row + 1],
            planner(np.array([start + row], np.int32), inputs.plan.pages),
        )
        assert mx.abs(together[row] - alone[0]).max().item() < 3e-6
