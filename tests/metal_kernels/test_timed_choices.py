"""What kernels are timed against is what runs in their place, operation by operation."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.core import SamplingParams
from mlxinfer.layers import mlp
from mlxinfer.layers.linear import Linear, Projection, QuantizedLinear
from mlxinfer.layers.norm import Join, RMSNorm
from mlxinfer.metal_kernels.add_norm import AddNorm
from mlxinfer.metal_kernels.gate_up import PLAIN, Gate, GateUp
from mlxinfer.metal_kernels.sample import (
    SETTINGS,
    TEMPERATURE,
    TOP_P,
    by_one_sort,
    random_logits,
    sample_twin,
    sample_variant,
    settings_array,
)
from mlxinfer.metal_kernels.selfcheck import KINDS
from mlxinfer.metal_kernels.variants import Variant
from mlxinfer.sampling.draw import uniforms
from mlxinfer.sampling.sampler import Sampler, apply_bitmask
from tests.bench.dispatches import VIEWS, as_on_metal, traced

ROWS = 8


def operations(results: Callable[[], list[mx.array]]) -> list[str]:
    """Of a graph, as Metal would get them; what only looks at memory another way is left out."""
    with as_on_metal():
        found = traced(
            lambda x: sum(y.astype(mx.float32).sum() for y in results()) + x, mx.zeros(1)
        )
    return sorted(name for name in found if name not in VIEWS)


def timed_against(variant: Variant) -> list[str]:
    case = KINDS[variant.kind].timed(variant, ROWS, 0)
    mx.eval(case.twin())  # and with that its inputs: what makes them is not timed
    return operations(case.twin)


@pytest.mark.parametrize("codes", [(4, 64), PLAIN], ids=str)
def test_gate_and_up_run_against_the_layers_product(codes: tuple[int, int]) -> None:
    bits, group_size = codes
    form = GateUp(Gate("silu", mx.bfloat16), 128, 8, bits, group_size, mx.bfloat16)
    weight, x = mx.zeros((16, 128), mx.bfloat16), mx.zeros((ROWS, 128), mx.bfloat16)
    projection: Projection = Linear(weight)
    if bits:
        arrays = mx.quantize(weight, group_size=group_size, bits=bits)
        mx.eval(arrays)
        projection = QuantizedLinear(*arrays, group_size=group_size, bits=bits, mode="affine")  # type: ignore[arg-type,misc]  # three arrays
    layer = mlp.gated("silu", mx.bfloat16)
    variant = form.variant(ROWS)
    assert timed_against(variant) == operations(lambda: [layer(projection(x))])


def test_sums_and_norms_run_against_the_layers_own() -> None:
    join = Join(RMSNorm(mx.ones(64), 1e-6), RMSNorm(mx.ones(64), 1e-6))
    x = mx.zeros((ROWS, 64))
    variant = AddNorm(64, mx.float32, 1e-6, 1e-6).variant

    def layer() -> list[mx.array]:
        total, normed = join(x, lambda residual: x if residual is None else x + residual)
        return [total, normed]

    assert timed_against(variant) == operations(layer)


def test_masks_run_against_the_samplers_own() -> None:
    logits, mask = mx.zeros((ROWS, 160)), mx.zeros((ROWS, 5), mx.uint32)
    assert timed_against(KINDS["bitmask"].samples[0]) == operations(
        lambda: [apply_bitmask(logits, mask)]
    )


@pytest.mark.parametrize("masked", [False, True])
def test_sampling_runs_against_no_more_than_the_samplers_own(masked: bool) -> None:
    logits, mask = mx.zeros((ROWS, 160)), mx.zeros((ROWS, 5), mx.uint32)
    sampler = Sampler(160)
    for row in range(ROWS):
        sampler.add(row, SamplingParams(temperature=0.9, top_p=0.9), [], [], frozenset())
    slots, counts = tuple(range(ROWS)), np.zeros(ROWS, np.int64)

    def plain() -> list[mx.array]:
        return [sampler.sample(logits, slots, counts, mask=mask if masked else None).tokens]

    timed, own = timed_against(sample_variant(mx.float32, masked=masked)), operations(plain)
    assert len(timed) <= len(own)
    assert timed.count("Sort") + timed.count("ArgSort") == 1
    assert timed.count("Scan") <= own.count("Scan")


def test_what_sampling_is_timed_against_draws_what_the_twin_draws() -> None:
    rows = np.zeros(60, SETTINGS)
    rows["temperature"], rows["top_p"], rows["count"] = TEMPERATURE, TOP_P, np.arange(60)
    logits = random_logits(60, 300)
    numbers = mx.array(uniforms(rows["stream"], rows["count"].astype(np.int64)))[:, None]
    found = np.array(by_one_sort(logits, numbers, None))
    twin = np.array(sample_twin(logits, settings_array(rows)))
    assert (found == twin).mean() > 0.95, "they differ next to where rounding decides alone"
