"""The kernel of mixed residual streams, executed on the CPU: against its twin and in a layer."""

import os

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.layers.hyper_connections import MixingConnection, StreamLogits
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.mixing import ROUNDING, STREAMS, TOKENS, Mixing, mixing, mixing_twin
from mlxinfer.metal_kernels.variants import ModelForm

SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("num_streams", STREAMS)
@pytest.mark.parametrize("num_tokens", [1, 3, 2 * TOKENS + 1])
@pytest.mark.parametrize("limit", [None, 30.0])
def test_agrees_with_its_twin(num_streams: int, num_tokens: int, limit: float | None) -> None:
    """For few tokens and for more than a threadgroup has, whose last SIMD group is not full."""
    rng = np.random.default_rng([SEED, num_streams, num_tokens])
    shape = num_tokens, num_streams * (num_streams + 2)
    logits = mx.array(rng.normal(0, 4, shape).astype(np.float32))
    logits[0] *= 20  # softmax and sigmoids at their ends
    form = Mixing(num_streams, int(rng.integers(1, 21)), 1e-6, limit)
    outputs = MetalCPU(seed=1).clean(lambda: mixing(logits, form))
    for ours, twin in zip(outputs, mixing_twin(logits, form), strict=True):
        assert ours.shape == twin.shape
        np.testing.assert_allclose(np.array(ours), np.array(twin), atol=ROUNDING)


@requires_compiler
def test_a_connection_weighs_in_plain_mlx_until_its_kernel_is_installed() -> None:
    rng = np.random.default_rng(SEED)
    sizes = (24, 4 * 16), (24,), (24,)
    parts = [mx.array(rng.normal(size=size).astype(np.float32)) for size in sizes]
    connection = MixingConnection(
        StreamLogits(*parts, 1e-5), RMSNorm(mx.ones(16), 1e-5), Mixing(4, 20, 1e-6)
    )
    x = mx.array(rng.normal(size=(3, 64)).astype(np.float32))
    plain = connection(x, mx.sin)
    machine = MetalCPU(seed=1)
    (use,) = connection.kernels(ModelForm(mx.float32))
    use.install(lambda _: True)
    with running_on(machine):
        np.testing.assert_allclose(np.array(connection(x, mx.sin)), np.array(plain), atol=1e-4)
    assert [report.kernel for report in machine.reports] == ["mixing"]


def test_other_numbers_of_streams_have_no_kernel() -> None:
    assert not Mixing(3, 20, 1e-6).has_kernel
