"""An index over blocks of tokens, each of one pooled key: a layer sees the best blocks alone.

T = tokens of the step, Hi = heads of the index, d = numbers of a key.
Sources: transformers' Qwen4-Exp (QSA) and GLM5-Next, after DeepSeek-V3.2's indexer, arXiv
2512.02556.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache_specs import PooledSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import Mixer
from .linear import Projection
from .norm import Norm
from .step import Rope, Step


@dataclass(slots=True, eq=False, kw_only=True)
class MeanIndexer(Mixer):
    """The key of a block is the mean of its tokens' keys, then normalised and position-encoded.

    A block has the position of its first token.
    """

    qk_proj: Projection  # (T, hidden) -> (T, (Hi + 1) * d), queries and then one key
    q_norm: Norm  # over queries (T, Hi, d)
    k_norm: Norm  # over the keys of blocks (N, d)
    num_heads: int  # Hi
    spec: PooledSpec  # what the cache keeps
    rope: Rope  # over the first numbers of queries and keys

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: Any = None) -> Any:
        """The blocks that tokens of x (T, hidden) see: the result of `PooledLayer.choose`."""
        qk = mx.unflatten(self.qk_proj(x), -1, (self.num_heads + 1, -1))
        queries, keys = mx.split(qk, [self.num_heads], axis=1)
        queries = self.rope(self.q_norm(queries), step.prepared[self.rope])
        weights = mx.full((len(x), self.num_heads), self.spec.dim**-0.5)
        return step.caches[self].choose(queries, weights, keys[:, 0], step.positions)

    def pool(self, raw: mx.array, positions: mx.array) -> mx.array:
        """Keys of N blocks' tokens (N, ratio, d) -> keys of the blocks (N, d).

        `positions`: of their first tokens, (N,), or (3, N) with M-RoPE.
        """
        keys = self.k_norm(raw.astype(mx.float32).mean(axis=1).astype(raw.dtype))
        return self.rope(keys[:, None], self.rope.prepare(positions))[:, 0]


@dataclass(slots=True, eq=False, kw_only=True)
class GatedIndexer(Mixer):
    """The key of a block is a weighted mean of its tokens' keys, each number with its own weights.

    The weights are a softmax over the tokens of the block, of what each token says and what its
    place in the block adds. Positions are not encoded.
    """

    q_proj: Projection  # the queries' compressed form (T, q_lora_rank) -> (T, Hi * d)
    k_proj: Projection  # (T, hidden) -> (T, d)
    k_norm: Norm  # over the keys of tokens
    gate_proj: Projection  # (T, hidden) -> (T, d), logits of the weights
    places: mx.array  # (ratio, d) float32, what is added to the logits
    weights_proj: Projection  # (T, hidden) -> (T, Hi), a weight of each head
    spec: PooledSpec  # what the cache keeps

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, compressed: mx.array | None = None) -> Any:
        """The blocks that tokens of x (T, hidden) see: the result of `PooledLayer.choose`.

        `compressed`: the queries' compressed form (T, q_lora_rank), which is always there.
        """
        assert compressed is not None
        weights = self.weights_proj(x).astype(mx.float32)  # (T, Hi)
        scale = (weights.shape[1] * self.spec.dim) ** -0.5
        queries = mx.unflatten(self.q_proj(compressed), -1, (weights.shape[1], self.spec.dim))
        raw = mx.concatenate([self.k_norm(self.k_proj(x)), self.gate_proj(x)], axis=-1)
        return step.caches[self].choose(queries, weights * scale, raw, step.positions)

    def pool(self, raw: mx.array, positions: mx.array) -> mx.array:
        """Keys and gates of N blocks' tokens (N, ratio, 2 * d) -> keys of the blocks (N, d)."""
        keys, gates = mx.split(raw, 2, axis=-1)
        shares = mx.softmax(gates.astype(mx.float32) + self.places, axis=1)
        return (shares.astype(raw.dtype) * keys).sum(axis=1)
