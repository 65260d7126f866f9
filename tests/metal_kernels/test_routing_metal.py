"""The kernel that chooses experts, executed on the CPU: against its twin and the layers."""

import os

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every

from mlxinfer.layers.moe import ExpertChoice
from mlxinfer.metal_kernels.add_norm import AddNorm
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.routing import (
    ROUNDING,
    SUM_EPS,
    Routing,
    choose_experts,
    route,
    route_twin,
)
from mlxinfer.metal_kernels.variants import ModelForm, dtype_name

SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
BIAS = mx.array(np.random.default_rng(1).uniform(0, 2, 70).astype(np.float32))
CHOICES = {
    "softmax of the best": (Routing(8, normalised=True), 128),
    "softmax of all": (Routing(4), 60),
    "sigmoids": (Routing(1, sigmoid=True), 16),
    "normalised sigmoids": (Routing(6, sigmoid=True, normalised=True), 64),
    "of a bias": (
        Routing(6, sigmoid=True, normalised=True, biased=True, eps=SUM_EPS, factor=2.5),
        70,
    ),
    "not normalised": (Routing(2, eps=SUM_EPS, factor=16.0), 8),
    "as many as a SIMD group has lanes": (Routing(32, normalised=True), 40),
    "512 experts": (Routing(10, normalised=True), 512),
}


def on_machine(routing: Routing, logits: mx.array) -> tuple[mx.array, mx.array]:
    machine = MetalCPU(seed=1)
    bias = BIAS if routing.biased else None
    outputs = machine.clean(lambda: route(logits, routing, bias))
    return outputs


def by_expert(weights: mx.array, experts: mx.array) -> np.ndarray:
    """(T, k) weights in the order of their experts."""
    order = np.argsort(np.array(experts), axis=-1)
    return np.take_along_axis(np.array(weights.astype(mx.float32)), order, axis=-1)


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(2, CHOICES))
@pytest.mark.parametrize(("dtype", "num_tokens"), [(mx.float32, 5), (mx.bfloat16, 1)])
def test_chooses_as_its_twin_and_the_layer(name: str, dtype: mx.Dtype, num_tokens: int) -> None:
    routing, count = CHOICES[name]
    bias = BIAS if routing.biased else None
    rng = np.random.default_rng([SEED, num_tokens, count])
    logits = mx.array(rng.permuted(np.linspace(-3, 3, num_tokens * count)).astype(np.float32))
    logits = logits.reshape(num_tokens, count).astype(dtype)
    if dtype != mx.float32:  # no two are equal: MLX does not say which of them it takes
        steps = rng.permuted(np.tile(np.arange(count), (num_tokens, 1)), axis=1) - count // 2
        logits = mx.array(steps.astype(np.float32) / 64).astype(dtype)
    weights, experts = on_machine(routing, logits)
    twin_weights, twin_experts = route_twin(logits, routing, bias)
    plain_weights, plain_experts = choose_experts(logits, routing, bias)
    assert (weights.dtype, experts.dtype) == (dtype, mx.uint32)
    assert mx.array_equal(experts, twin_experts)
    assert np.array_equal(np.sort(np.array(experts)), np.sort(np.array(plain_experts)))
    rounding = 2 * ROUNDING[dtype_name(dtype)] * max(1.0, routing.factor)
    assert mx.allclose(weights, twin_weights, rtol=0, atol=rounding).item()
    off = by_expert(weights, experts) - by_expert(plain_weights, plain_experts)
    assert np.abs(off).max() <= rounding


@requires_compiler
def test_of_equal_experts_the_first_and_never_one_that_is_not_there() -> None:
    routing = Routing(3, normalised=True)
    flat = mx.zeros((1, 40))
    assert on_machine(routing, flat)[1].tolist() == [[0, 1, 2]]
    hidden = mx.full((2, 40), -mx.inf)
    hidden[0, 7] = 1.0
    hidden[1] = mx.nan
    experts = np.array(on_machine(routing, hidden)[1])
    assert experts[0, 0] == 7
    assert experts.max() < 40


def test_whole_numbers_of_a_config_are_floats_in_metal() -> None:
    assert "3.0f" in Routing(2, factor=3).launch((1, 8), mx.float32).kernel.body
    assert "1.0f" in AddNorm(64, mx.float32, 1, None).launch((1, 64)).kernel.body


def test_groups_have_no_kernel() -> None:
    routing = Routing(2, sigmoid=True, biased=True, num_groups=4, num_best=2)
    assert not ExpertChoice(routing, mx.zeros(8)).kernels(ModelForm(mx.float32, 8))
    assert ExpertChoice(Routing(2)).kernels(ModelForm(mx.float32, 8))
    assert Routing(8, normalised=True) is Routing(8, normalised=True), "layers share launches"


@requires_compiler
def test_a_layer_chooses_in_plain_mlx_until_its_kernel_is_installed() -> None:
    choice, logits = ExpertChoice(Routing(2, normalised=True)), mx.arange(8.0).reshape(1, 8)
    assert sorted(choice(logits)[1].tolist()[0]) == [6, 7]
    machine = MetalCPU(seed=1)
    (use,) = choice.kernels(ModelForm(mx.float32, 8))
    use.install(lambda _: True)
    with running_on(machine):
        assert choice(logits)[1].tolist() == [[7, 6]]
    assert [report.kernel for report in machine.reports] == ["routing"]
