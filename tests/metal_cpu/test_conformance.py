"""MLX's own kernels, as its wheel brings them, give on this machine what MLX gives on the CPU."""

import mlx.core as mx
import pytest

from metal_cpu import requires_compiler
from metal_cpu.mlx_kernels import (
    Attention,
    Ran,
    quantized_matvec,
    sdpa_vector,
    sdpa_vector_2pass,
    steel_attention,
)

pytestmark = [requires_compiler, pytest.mark.ci]
TOLERANCES = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}  # of values around 1
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


def attention(
    dtype: mx.Dtype, *shape: int, capacity: int = 0, causal: bool = False, seed: int = 0
) -> Attention:
    """shape: B, H, K, L, N, D."""
    batch, heads, kv_heads, length, num_keys, dim = shape
    keys = iter(mx.random.split(mx.random.key(sum(shape)), 5))

    def drawn(*size: int) -> mx.array:
        return mx.random.normal(size, key=next(keys)).astype(dtype)

    queries = drawn(batch, heads, length, dim)
    cache = [drawn(batch, kv_heads, capacity or num_keys, dim) for _ in range(2)]
    return Attention(queries, *cache, num_keys, dim**-0.5, causal, seed)


def check(ran: Ran, call: Attention) -> None:
    assert not [fault for report in ran.reports for fault in report.faults]
    expected = call.expected(mx.float32)
    error = mx.abs(ran.output.astype(mx.float32) - expected).max().item()
    assert error <= TOLERANCES[call.queries.dtype]


ONE_PASS = [
    attention(F32, 1, 4, 2, 1, 70, 64, capacity=80),
    attention(BF16, 1, 4, 2, 1, 70, 64, capacity=80),
    attention(F16, 2, 4, 2, 4, 70, 128, causal=True),
]


@pytest.mark.parametrize("call", ONE_PASS)
def test_attention_in_one_pass(call: Attention) -> None:
    check(sdpa_vector(call), call)


@pytest.mark.parametrize("call", [
    attention(F16, 1, 4, 2, 1, 100, 128),
    attention(F32, 2, 4, 2, 2, 90, 64, causal=True, seed=2),
])  # fmt: skip
def test_attention_in_two_passes(call: Attention) -> None:
    check(sdpa_vector_2pass(call, blocks=32), call)


@pytest.mark.parametrize(("dim", "shared"), [(64, 8), (128, 4)])
def test_attention_in_two_passes_that_share_keys(dim: int, shared: int) -> None:
    call = attention(F16, 2, 16, 2, 1, 160, dim, seed=3)
    check(sdpa_vector_2pass(call, blocks=32, shared=shared), call)


@pytest.mark.alike
@pytest.mark.parametrize("call", [
    attention(F16, 1, 4, 2, 40, 77, 64),
    attention(F32, 1, 2, 1, 64, 96, 64, causal=True, seed=1),
    attention(BF16, 1, 2, 2, 33, 40, 128),
])  # fmt: skip
def test_mlx_attention_in_tiles_gives_its_numbers(call: Attention) -> None:
    check(steel_attention(call), call)


@pytest.mark.alike
@pytest.mark.parametrize(("bits", "fast", "dtype"), [
    (4, True, F16), (8, True, F32), (3, True, F16), (2, False, F16), (6, False, BF16),
])  # fmt: skip
def test_quantised_matrix_times_vector(bits: int, fast: bool, dtype: mx.Dtype) -> None:
    x = mx.random.normal((1, 512), key=mx.random.key(1)).astype(dtype)
    matrix = mx.random.normal((20 if not fast else 16, 512), key=mx.random.key(2)).astype(dtype)
    weights = mx.quantize(matrix, group_size=64, bits=bits)
    codes, scales, biases = (w if w.dtype == mx.uint32 else w.astype(mx.float32) for w in weights)
    expected = mx.quantized_matmul(
        x.astype(mx.float32), codes, scales, biases, group_size=64, bits=bits
    )
    ran = quantized_matvec(x, weights, group_size=64, bits=bits, fast=fast)
    assert not ran.reports[0].faults
    error = mx.abs(ran.output.astype(mx.float32) - expected).max().item()
    assert error <= TOLERANCES[dtype] * mx.abs(expected).max().item()
    assert ran.reports[0].buffers["w"].requested_bytes == codes.nbytes, "codes are read once"
