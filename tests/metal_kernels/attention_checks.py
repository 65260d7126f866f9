"""Attention kernels against their twins, on a machine that sees and counts every access."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from metal_cpu import MetalCPU
from scenes import Inputs, Scene, build, vector_bytes

from mlxinfer.metal_kernels.mla_attention import mla_attention_on_metal
from mlxinfer.metal_kernels.paged_attention import (
    Softmax,
    paged_attention_gathered,
    paged_attention_on_metal,
)

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
    actual = machine.clean(lambda: kernel(inputs.queries, *arguments, inputs.plan, **options))
    for report in machine.reports:
        assert report.threadgroup_bytes <= MAX_THREADGROUP_BYTES
        assert np.prod(report.threadgroup) <= MAX_THREADS
        assert report.bank_ways <= MAX_BANK_WAYS, report.bank_place
    expected = twin(inputs.queries, *arguments, inputs.plan, **options)
    assert actual[0].dtype == inputs.queries.dtype
    assert actual[0].shape == expected[0].shape
    tolerance = TOLERANCE[inputs.queries.dtype]
    worst = max(_error(f, e) for f, e in zip(actual, expected, strict=True)) / tolerance
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
        softmax=Softmax(scene.key_dim**-0.5, inputs.sink_logits if sinks else None, soft_cap),
        value_dim=scene.value_dim,
        log_sums=log_sums,
    )


def _error(actual: mx.array, expected: mx.array) -> float:
    ours, theirs = (np.array(a.astype(mx.float32)) for a in (actual, expected))
    assert np.isfinite(theirs).all(), "the twin sees something hidden"
    errors = np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))
    return float(np.where(np.isnan(errors), np.inf, errors).max())


# -- bytes -----------------------------------------------------------------------------------

STORED: dict[int, int | None] = {16: None, 8: 8, 4: 4}
BITS = tuple(STORED)
ROWS = tuple((group, queries) for queries in (1, 4) for group in (1, 4, 8, 16))


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of keys and values over the least there is: each once per KV head.

    Attributes:
        requested: by all threads. A scale or bias that several lanes of a SIMD group load at once
            counts once, numbers and codes count for each lane.
        unique: that a threadgroup loads at least once, summed over threadgroups: what comes from
            memory where only threads of one threadgroup share a cache.
        dequantised: how often each code is loaded, and so dequantised; None: plain.
    """

    requested: float
    unique: float
    dequantised: float | None = None


def one_head(dim: int, bits: int, group: int, queries: int, tokens: int) -> Scene:
    """`group` query heads and `queries` query tokens of one KV head of `dim` numbers."""
    stored = (STORED[bits], STORED[bits])
    return Scene([tokens], [queries], group=group, key_dim=dim, value_dim=dim, bits=stored)


def latents(bits: int, heads: int, tokens: int) -> Scene:
    """One query token of a latent cache of 576 numbers."""
    stored = (STORED[bits], None)
    return Scene([tokens], [1], group=heads, key_dim=576, value_dim=8, bits=stored)


def moved(scene: Scene) -> Moved:
    """Count the bytes that the paged kernels move."""
    inputs = build(scene)
    report = _report(
        inputs,
        lambda: paged_attention_on_metal(
            inputs.queries,
            inputs.keys,
            inputs.values,
            inputs.plan,
            Softmax(scene.key_dim**-0.5),
            value_dim=scene.value_dim,
        ),
    )
    codes = _codes_bytes(inputs) if scene.bits != (None, None) else None
    return _shares(report, inputs.least_bytes, codes)


def moved_latents(scene: Scene) -> Moved:
    """Count the bytes that the latent kernel moves; the scene's first plane holds the latents."""
    inputs = build(scene)
    report = _report(
        inputs, lambda: mla_attention_on_metal(inputs.queries, inputs.keys, inputs.plan, scale=1.0)
    )
    width = inputs.keys.pages[0].shape[-1]
    codes = inputs.visible * width if scene.bits[0] else None
    return _shares(report, inputs.visible * vector_bytes(inputs.keys), codes)


def _report(inputs: Inputs, call: Any) -> Any:
    split = ("outputs", "figures") if inputs.plan.is_split else ()
    device = MetalCPU(may_stay_unwritten=split)
    device.clean(call)
    return device.reports[0]


def _shares(report: Any, least: int, codes: int | None) -> Moved:
    names = [
        name
        for name in report.buffers
        if name.startswith(("key_", "value_", "tail_", "latent_")) and not name.endswith("_shape")
    ]
    numbers = report.total([name for name in names if name.endswith("codes")])
    groups = report.total([name for name in names if not name.endswith("codes")])
    requested = numbers.requested_bytes + groups.requested_once_per_simdgroup_bytes
    unique = numbers.unique_per_threadgroup_bytes + groups.unique_per_threadgroup_bytes
    return Moved(
        requested / least,
        unique / least,
        None if codes is None else numbers.requested_bytes / codes,
    )


def _codes_bytes(inputs: Inputs) -> int:
    heads = inputs.keys.pages[0].shape[0]
    widths = sum(plane.pages[0].shape[-1] for plane in (inputs.keys, inputs.values))
    return inputs.visible * heads * widths
