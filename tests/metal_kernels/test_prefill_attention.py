"""Prompts in tiles: the kernel against its twin, on a machine that sees every access."""

import mlx.core as mx
import pytest
from attention_checks import check
from metal_cpu import requires_compiler

from mlxinfer.metal_kernels.paged_attention_gather import paged_attention_gathered
from mlxinfer.metal_kernels.paged_attention_kernel import paged_attention_on_metal
from tests.bench.kernel_scenes import Scene, build


def run(scene: Scene, *, sinks: bool = False, soft_cap: float | None = None, seed: int = 0) -> None:
    inputs = build(scene)
    check(
        paged_attention_on_metal,
        paged_attention_gathered,
        inputs,
        inputs.keys,
        inputs.values,
        seed=seed,
        scale=scene.key_dim**-0.5,
        sink_logits=inputs.sink_logits if sinks else None,
        soft_cap=soft_cap,
        value_dim=scene.value_dim,
    )


D256 = {"key_dim": 256, "value_dim": 256, "prefill": True}
SCENES = {
    "two ragged chunks": Scene([70, 50], [40, 50], kv_heads=2, group=2, dtype=mx.bfloat16, **D256),
    "window": Scene([150], [90], group=4, window=40, sinks=3, dtype=mx.bfloat16, **D256),
    "codes of 8 and 4 bits": Scene([60], [40], group=4, bits=(8, 4), **D256),
    "192 and 128": Scene([60], [60], group=3, key_dim=192, value_dim=128, prefill=True),
    "64, split": Scene([200], [30], group=2, item_blocks=1, prefill=True),
    "512": Scene([40], [20], group=2, key_dim=512, value_dim=512, prefill=True),
}


@requires_compiler
@pytest.mark.parametrize("name", SCENES)
def test_same_as_the_twin(name: str) -> None:
    run(SCENES[name], sinks=name != "512", soft_cap=5.0 if "split" in name else None, seed=1)
