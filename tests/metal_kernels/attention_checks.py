"""Kernel against twin, on a machine that sees every access."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from metal_cpu import MetalCPU

from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.paged_attention import (
    paged_attention_gathered,
    paged_attention_on_metal,
)
from tests.bench.kernel_scenes import Inputs, Scene, build

Attention = Callable[..., list[mx.array]]

# Of max(1, |expected|): float32 sums in another order, or two roundings to 16 bits.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
MAX_THREADGROUP_BYTES = 16_384
MAX_THREADS = 512
MAX_BANK_WAYS = 2


def check(
    kernel: Attention,
    twin: Attention,
    inputs: Inputs,
    *arguments: Any,
    seed: int = 0,
    **options: Any,
) -> float:
    """The largest error, as a share of what is allowed."""
    # Rows that a shorter sequence does not have stay unwritten in partials.
    unwritten = ("outputs", "figures") if inputs.plan.is_split else ()
    machine = MetalCPU(seed=seed, may_stay_unwritten=unwritten)
    with running_on(machine):
        found = kernel(inputs.queries, *arguments, inputs.plan, **options)
    machine.assert_clean()
    for report in machine.reports:
        assert report.threadgroup_bytes <= MAX_THREADGROUP_BYTES
        assert np.prod(report.threadgroup) <= MAX_THREADS
        assert report.bank_ways <= MAX_BANK_WAYS, report.bank_place
    expected = twin(inputs.queries, *arguments, inputs.plan, **options)
    assert found[0].dtype == inputs.queries.dtype
    assert found[0].shape == expected[0].shape
    tolerance = TOLERANCE[inputs.queries.dtype]
    worst = max(_error(f, e) for f, e in zip(found, expected, strict=True)) / tolerance
    assert worst <= 1, worst
    return worst


def check_scene(
    scene: Scene,
    *,
    sinks: bool = False,
    soft_cap: float | None = None,
    log_sums: bool = False,
    seed: int = 0,
) -> float:
    """The paged kernels on a scene, as `check`."""
    inputs = build(scene)
    return check(
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
        log_sums=log_sums,
    )


def _error(found: mx.array, expected: mx.array) -> float:
    ours, theirs = (np.array(a.astype(mx.float32)) for a in (found, expected))
    assert np.isfinite(theirs).all(), "the twin sees something hidden"
    errors = np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))
    return float(np.where(np.isnan(errors), np.inf, errors).max())
