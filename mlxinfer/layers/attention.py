"""Grouped-query attention over a flat list of tokens. Knows no sequences, masks or pages."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..metal_kernels.heads import Heads
from .kv import LayerKV
from .linear import Projection
from .norm import Norm
from .rope import Rope

HeadsMaker = Callable[[int | None, int | None], Heads]  # from bits of keys and of values


class Attention:
    """Fused QKV projection, optional QK-norm, rope on Q and K together, then the KV cache."""

    __slots__ = (
        "heads_shape",
        "k_start",
        "make_heads",
        "num_heads",
        "o_proj",
        "qk_norm",
        "qkv_proj",
        "rope",
        "scale",
        "sinks",
        "v_start",
    )

    def __init__(
        self,
        *,
        qkv_proj: Projection,
        o_proj: Projection,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rope: Rope | None,
        qk_norm: Norm | None = None,
        sinks: mx.array | None = None,
        make_heads: HeadsMaker | None = None,
    ) -> None:
        self.qkv_proj = qkv_proj  # (T, hidden) -> (T, (num_heads + 2 * num_kv_heads) * head_dim)
        self.o_proj = o_proj  # (T, num_heads * head_dim) -> (T, hidden)
        self.num_heads = num_heads
        self.k_start = (num_heads,)
        self.v_start = (num_heads + num_kv_heads,)
        self.heads_shape = (-1, num_heads + 2 * num_kv_heads, head_dim)
        self.scale = scale
        self.rope = rope
        self.qk_norm = qk_norm  # over (T, num_heads + num_kv_heads, head_dim)
        self.sinks = sinks  # (num_heads,)
        self.make_heads = make_heads  # what one kernel does in place of norm, rope and storing

    def heads(self, x: mx.array, prepared: Any, kv: LayerKV) -> mx.array:
        """x (T, hidden) -> what the heads saw, (T, num_heads * head_dim)."""
        projected = self.qkv_proj(x)  # (T, (H + 2 Hkv) * D)
        if kv.heads is not None:
            return kv.attend_heads(projected, scale=self.scale, sinks=self.sinks)
        qkv = projected.reshape(self.heads_shape)  # (T, H + 2 Hkv, D)
        qk, values = mx.split(qkv, self.v_start, axis=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if self.rope is not None:
            qk = self.rope(qk, prepared)
        queries, keys = mx.split(qk, self.k_start, axis=1)
        return kv.attend(queries, keys, values, scale=self.scale, sinks=self.sinks)

    def __call__(self, x: mx.array, prepared: Any, kv: LayerKV) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        return self.o_proj(self.heads(x, prepared, kv))

    def onto(self, residual: mx.array, x: mx.array, prepared: Any, kv: LayerKV) -> mx.array:
        """residual (T, hidden) + self(x)."""
        return self.o_proj.onto(residual, self.heads(x, prepared, kv))
