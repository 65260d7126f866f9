"""MLX's gated delta recurrence in one call beside one call for each token, on the default device.

`mx.fast.gated_delta_update` has a fused kernel of its own for some shapes on a GPU, and states that
are resumed, replayed and split over steps rest on all its ways giving one result. On MLX's CPU
backend they give the same bits.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

TOLERANCE = 1e-2  # of the largest number; sums are formed in another order


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one call: heads and numbers of keys and of values, tokens, and their dtype."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    tokens: int
    dtype: str = "bfloat16"
    masked: bool = False  # the second of two sequences is shorter

    def __str__(self) -> str:
        kind = f"{self.dtype}{' masked' if self.masked else ''}"
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return f"gated_delta_update {keys} {values} {self.tokens} tokens {kind}"


QWEN = (16, 128, 32, 128)  # heads of Qwen 3.5 35B-A3B; of 27B there are 48 for values
SHAPES = (
    *(DeltaShape(*QWEN, tokens) for tokens in (2, 8, 64, 200)),
    *(DeltaShape(*QWEN, tokens, masked=True) for tokens in (8, 200)),
    DeltaShape(*QWEN, 64, dtype="float32"),
    DeltaShape(16, 128, 48, 128, 64),
)


def difference(shape: DeltaShape, seed: int = 0) -> float:
    """The difference of outputs and states between one call and one call for each token.

    Returns:
        The larger of the two errors, each as a share of the largest number that stepping gives.
    """
    queries, keys, values, decay, strength, state = _inputs(shape, seed)
    counts = [shape.tokens, max(1, shape.tokens // 3)] if shape.masked else [shape.tokens] * 2
    mask = mx.arange(shape.tokens) < mx.array(counts)[:, None] if shape.masked else None
    y, after = mx.fast.gated_delta_update(queries, keys, values, decay, strength, state, mask)
    computed, expected = [], []
    for row, count in enumerate(counts):
        running, steps = state[row : row + 1], []
        for t in range(count):
            at = slice(row, row + 1), slice(t, t + 1)
            out, running = mx.fast.gated_delta_update(
                queries[at], keys[at], values[at], decay[at], strength[at], running
            )
            steps.append(out[0])
        mx.eval(running)
        expected += [mx.concatenate(steps), running[0]]
        computed += [y[row, :count], after[row]]
    return max(_off(ours, theirs) for ours, theirs in zip(computed, expected, strict=True))


def _inputs(shape: DeltaShape, seed: int) -> list[mx.array]:
    """Queries, keys of length 1, values, decay and strength of two sequences, and their states."""
    rng = np.random.default_rng(seed)
    keys = (2, shape.tokens, shape.key_heads, shape.key_dim)
    values = (2, shape.tokens, shape.value_heads, shape.value_dim)
    state = (2, shape.value_heads, shape.value_dim, shape.key_dim)

    def normal(size: tuple[int, ...]) -> mx.array:
        return mx.array(rng.normal(size=size).astype(np.float32))

    dtype: mx.Dtype = getattr(mx, shape.dtype)
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(keys), normal(keys)))
    gates = mx.sigmoid(normal(values[:3]) + 3.0), mx.sigmoid(normal(values[:3]))
    return [*(x.astype(dtype) for x in (q, k, normal(values))), *gates, normal(state)]


def _off(computed: mx.array, expected: mx.array) -> float:
    ours, theirs = (np.array(one.astype(mx.float32)) for one in (computed, expected))
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
