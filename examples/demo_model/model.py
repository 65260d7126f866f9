"""A small Qwen3-style decoder in plain MLX, for training only. No KV cache, no sampling.

Parameter names are those of the checkpoint. Source: Qwen3 technical report, arXiv:2505.09388.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; all are multiples of 64, so that every matrix has whole groups."""

    vocab_size: int = 2048
    hidden_size: int = 320
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1024


SHAPES = {
    "demo": Shape(),
    "demo-draft": Shape(
        hidden_size=192, num_layers=2, num_heads=4, num_kv_heads=1, intermediate_size=512
    ),
}


class Attention(nn.Module):
    """Causal grouped-query attention with QK-norm and RoPE."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=NORM_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        queries = self._rotated(self.q_norm(self._split(self.q_proj(x))))  # (B, H, L, head_dim)
        keys = self._rotated(self.k_norm(self._split(self.k_proj(x))))
        values = self._split(self.v_proj(x))
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask="causal"
        )
        return self.o_proj(mixed.swapaxes(1, 2).flatten(2))

    def _split(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, -1, (-1, self.head_dim)).swapaxes(1, 2)

    def _rotated(self, x: mx.array) -> mx.array:
        return mx.fast.rope(
            x, self.head_dim, traditional=False, base=ROPE_THETA, scale=1.0, offset=0
        )


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = [Layer(shape) for _ in range(shape.num_layers)]
        self.norm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)


class Model(nn.Module):
    """The decoder with its tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)

    def __call__(self, ids: mx.array) -> mx.array:
        """Map token ids (B, L) to logits (B, L, vocab)."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.embed_tokens.as_linear(self.model.norm(x))
