"""The one decoder: layers of (attention, MLP, norm layout), built from a config and a few switches.

Knows no sequences: every token brings its own position, and what it may attend to is behind the
KV cache that the caller passes for each layer.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..core import KVSpec
from ..layers.activations import Gated
from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.kv import LayerKV
from ..layers.linear import Projection
from ..layers.norm import Norm
from ..layers.rope import Rope
from ..layers.tree import arrays
from .config import ModelConfig


class FeedForward(Protocol):
    """MLP or mixture of experts: (T, hidden) -> (T, hidden)."""

    activation: Gated

    def __call__(self, x: mx.array) -> mx.array:
        """The block alone."""
        ...

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """The block, added to the residual stream."""
        ...


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    __slots__ = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(
        self, input_layernorm: Norm, self_attn: Attention, post: Norm, mlp: FeedForward
    ) -> None:
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post
        self.mlp = mlp

    def __call__(self, x: mx.array, prepared: Any, kv: LayerKV) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        x = self.self_attn.onto(x, self.input_layernorm(x), prepared, kv)
        return self.mlp.onto(x, self.post_attention_layernorm(x))


class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    __slots__ = ("mlp", "norms", "self_attn")

    def __init__(self, norms: Sequence[Norm], self_attn: Attention, mlp: FeedForward) -> None:
        self.norms = tuple(norms)  # before and after attention, before and after the MLP
        self.self_attn = self_attn
        self.mlp = mlp

    def __call__(self, x: mx.array, prepared: Any, kv: LayerKV) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        before, after, before_mlp, after_mlp = self.norms
        x = x + after(self.self_attn(before(x), prepared, kv))
        return x + after_mlp(self.mlp(before_mlp(x)))


class Model:
    """A decoder-only language model over a flat list of tokens.

    Attributes:
        config: as normalised.
        kv_specs: what each layer's KV cache must keep; one entry a layer.
        activation_dtype: the dtype of the keys and values handed to `attend`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed_tokens: Embedding,
        layers: Sequence[PreNormLayer | SandwichLayer],
        ropes: Sequence[Rope],
        rope_of_layer: Sequence[int],
        norm: Norm,
        lm_head: Projection,
        activation_dtype: mx.Dtype,
        embed_scale: float | None = None,
    ) -> None:
        self.config = config
        self.embed_tokens = embed_tokens
        self.layers = list(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.activation_dtype = activation_dtype
        self.kv_specs = [
            KVSpec(config.num_kv_heads, config.head_dim, config.head_dim, window)
            for window in config.windows
        ]
        self._ropes = list(ropes)
        self._steps = list(zip(self.layers, rope_of_layer, strict=True))
        self._embed_scale = None if embed_scale is None else mx.array(embed_scale, activation_dtype)

    def __call__(self, ids: mx.array, positions: mx.array, kv: Sequence[LayerKV]) -> mx.array:
        """One step over T tokens of any sequences.

        Args:
            ids: (T,) int32, each in [0, vocab_size): MLX does not check.
            positions: (T,) int32, each token's place in its own sequence.
            kv: one cache per layer, which knows the sequences.

        Returns:
            (T, hidden_size) after the final norm.
        """
        x = self.embed_tokens(ids)
        if self._embed_scale is not None:
            x = x * self._embed_scale
        prepared = [rope.prepare(positions) for rope in self._ropes]
        for (layer, rope), cache in zip(self._steps, kv, strict=True):
            x = layer(x, prepared[rope], cache)
        return self.norm(x)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [layer.self_attn for layer in self.layers]

    @property
    def activations(self) -> list[Gated]:
        """The gated activation of each layer."""
        return [layer.mlp.activation for layer in self.layers]

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden (R, hidden_size) as `__call__` returns it -> (R, vocab_size)."""
        logits = self.lm_head(hidden)
        cap = self.config.final_softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def arrays(self) -> list[mx.array]:
        """Every array that the model holds; a tied table once."""
        parts: list[Any] = [self.embed_tokens, self.layers, self.norm, self._ropes]
        if not self.config.tie_word_embeddings:
            parts.append(self.lm_head)
        return list(arrays(parts))

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(array.nbytes for array in self.arrays())
