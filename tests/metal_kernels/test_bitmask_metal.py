"""The bitmask kernel, executed on the CPU: against its twin and the sampler's."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.metal_kernels.bitmask import allowed, bitmask, bitmask_twin
from mlxinfer.sampling.sampler import apply_bitmask


@requires_compiler
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "dtype"),
    [
        (1, 1, mx.float32), (3, 31, mx.float32), (2, 32, mx.float16), (9, 33, mx.bfloat16),
        (2, 515, mx.bfloat16),
    ],
)  # fmt: skip
def test_kernel_twin_and_sampler_agree(num_rows: int, vocab_size: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = mx.array(rng.normal(size=(num_rows, vocab_size)).astype(np.float32)).astype(dtype)
    words = (num_rows, -(-vocab_size // 32))
    mask = mx.array(rng.integers(0, 2**32, words, dtype=np.uint32))
    machine = MetalCPU(seed=1)
    masked = machine.clean(lambda: bitmask(logits, mask))
    assert masked.dtype == dtype
    assert mx.array_equal(masked, bitmask_twin(logits, mask))
    assert mx.array_equal(masked, apply_bitmask(logits, mask))


def test_tokens_without_a_bit_are_forbidden() -> None:
    bits = allowed(mx.array([[0xFFFFFFFF]], mx.uint32), 40)
    assert bits.tolist() == [[True] * 32 + [False] * 8]
