"""An index over blocks of tokens, each of one pooled key: a layer sees the best blocks alone.

T = tokens of the step, Hi = heads of the index, d = numbers of a key.
Source: transformers' Qwen4-Exp (QSA), after DeepSeek-V3.2's indexer, arXiv 2512.02556.
"""

from typing import Any

import mlx.core as mx

from ..core import PooledSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import Mixer
from .linear import Projection
from .norm import Norm
from .step import Rope, Step


class MeanIndexer(Mixer):
    """The key of a block is the mean of its tokens' keys, then normalised and position-encoded.

    A block has the position of its first token.

    Args:
        qk_proj: (T, hidden) -> (T, (Hi + 1) * d), queries and then one key.
        q_norm: over queries (T, Hi, d).
        k_norm: over the keys of blocks (N, d).
        num_heads: Hi.
        spec: what the cache keeps.
        rope: over the first numbers of queries and keys.
    """

    __slots__ = ("k_norm", "num_heads", "q_norm", "qk_proj", "rope", "spec")

    spec: PooledSpec

    def __init__(
        self,
        *,
        qk_proj: Projection,
        q_norm: Norm,
        k_norm: Norm,
        num_heads: int,
        spec: PooledSpec,
        rope: Rope,
    ) -> None:
        self.qk_proj = qk_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.num_heads = num_heads
        self.spec = spec
        self.rope = rope

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: Any = None) -> Any:
        """The blocks that tokens of x (T, hidden) see, as of `PooledLayer.choose`."""
        both = mx.unflatten(self.qk_proj(x), -1, (self.num_heads + 1, -1))
        queries, keys = mx.split(both, [self.num_heads], axis=1)
        queries = self.rope(self.q_norm(queries), step.prepared[self.rope])
        weights = mx.full((len(x), self.num_heads), self.spec.dim**-0.5)
        return step.caches[self].choose(queries, weights, keys[:, 0], step.positions)

    def pool(self, raw: mx.array, positions: mx.array) -> mx.array:
        """Keys of N blocks' tokens (N, ratio, d) -> keys of the blocks (N, d).

        `positions`: of their first tokens, (N,), or (3, N) with M-RoPE.
        """
        keys = self.k_norm(raw.astype(mx.float32).mean(axis=1).astype(raw.dtype))
        return self.rope(keys[:, None], self.rope.prepare(positions))[:, 0]
