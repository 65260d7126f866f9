"""An index over blocks of tokens, ranked by their best token: a layer sees the best blocks alone.

T = tokens of the step, Hi = heads of the index, d = numbers of a key.
Source: transformers' MiniMax M3.
"""

from typing import Any

import mlx.core as mx

from ..core import BlockSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import Mixer
from .linear import Projection
from .norm import Norm
from .step import Rope, Step


class BlockIndexer(Mixer):
    """Queries of a few heads, and one key a token, each normalised and then position-encoded.

    Args:
        qk_proj: (T, hidden) -> (T, (Hi + 1) * d), queries and then one key.
        qk_norm: over (T, Hi + 1, d).
        num_heads: Hi.
        served: query heads of attention that see what one of them chooses.
        spec: what the cache keeps.
        rope: over the first numbers of queries and keys.
    """

    __slots__ = ("num_heads", "qk_norm", "qk_proj", "rope", "served", "spec")

    spec: BlockSpec

    def __init__(
        self,
        *,
        qk_proj: Projection,
        qk_norm: Norm,
        num_heads: int,
        served: int,
        spec: BlockSpec,
        rope: Rope,
    ) -> None:
        self.qk_proj = qk_proj
        self.qk_norm = qk_norm
        self.num_heads = num_heads
        self.served = served
        self.spec = spec
        self.rope = rope

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None."""
        return []

    def __call__(self, x: mx.array, step: Step, residual: Any = None) -> Any:
        """The blocks that tokens of x (T, hidden) see, as of `BlockLayer.choose`."""
        both = mx.unflatten(self.qk_proj(x), -1, (self.num_heads + 1, -1))  # (T, Hi + 1, d)
        both = self.rope(self.qk_norm(both), step.prepared[self.rope])
        queries, keys = mx.split(both, [self.num_heads], axis=1)
        return step.caches[self].choose(queries, keys[:, 0], self.served)
