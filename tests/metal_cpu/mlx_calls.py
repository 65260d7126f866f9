"""One call of a kernel of MLX: what goes in, what must come out, buffers. Runs nothing.

B = sequences, H = query heads, K = KV heads, L = query tokens, N = keys, D = head_dim.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_cpu import arrays
from metal_cpu.dispatch import Buffer
from metal_cpu.report import Report

NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
FOLDER = "mlx/backend/metal/kernels"


@dataclass(slots=True)
class Ran:
    """What kernels gave, and a report of each dispatch."""

    output: mx.array
    reports: list[Report]


@dataclass(frozen=True, slots=True)
class Attention:
    """One call of attention.

    Args:
        queries: (B, H, L, D).
        keys, values: (B, K, capacity, D), of which the first `num_keys` are seen.
        mask: "causal", or what may be seen (B, H, L, N), or additive of the queries' dtype.
        sinks: (H,) logits that join each softmax without a value.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    num_keys: int
    scale: float
    mask: mx.array | str | None = None
    sinks: mx.array | None = None
    seed: int = 0
    checked: bool = True

    @property
    def kind(self) -> str:
        """The element type as kernels name it."""
        return NAMES[self.queries.dtype]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def expected(self, dtype: mx.Dtype | None = None) -> mx.array:
        """What MLX computes on the CPU, in another dtype if wanted."""
        dtype = dtype or self.queries.dtype
        mask = self.mask
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            mask = mask.astype(dtype)
        return mx.fast.scaled_dot_product_attention(
            self.queries.astype(dtype),
            self.keys[:, :, : self.num_keys].astype(dtype),
            self.values[:, :, : self.num_keys].astype(dtype),
            scale=self.scale,
            mask=mask,
            sinks=None if self.sinks is None else self.sinks.astype(dtype),
        )


def input_of(name: str, array: mx.array) -> Buffer:
    """A copy of an array."""
    return Buffer.of_input(name, arrays.to_bytes(array))


def number_of(name: str, value: float, dtype: type[np.generic]) -> Buffer:
    """A single number."""
    return Buffer.of_input(name, arrays.scalar(value, dtype))


def output_of(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> Buffer:
    """Memory for an array."""
    return Buffer.of_output(name, int(np.prod(shape)) * dtype.size)
