"""Muse Glimmer: sandwich norms, a gate on attention, norms of Q and K without weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...layers.linear import Projection
from ...layers.norm import Norm, RMSNorm
from ...layers.rope import RopeSpec
from ...layers.step import Layer, Step
from ..config import FULL, SLIDING, ModelConfig, with_layer_thetas
from ..decoder import Entry, ResidualLayer
from ..family import Family, HeadNorms
from ..jsonfields import Fields


class MuseGlimmer(Family):
    """Muse Glimmer 30B. Every fourth layer from the last sees all and has no positions."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "hidden_activation": "silu",
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    }
    norm_offset = 1.0
    head_norms = HeadNorms()

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """A period of four ends with the last layer."""
        return [SLIDING if (num_layers - 1 - i) % 4 else FULL for i in range(num_layers)]

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """By the base that `layer_rope_theta` states for each layer; 0: it has no positions."""
        return with_layer_thetas(fields, super().rope_specs(fields, layer_types, head_dim))

    @classmethod
    def layers_with_rope(cls, fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
        stated, count = fields.get("layer_rope_theta") is not None, len(layer_types)
        return [stated or (count - 1 - i) % 4 > 0 for i in range(count)]

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, logit_scale=config.fields.number("output_multiplier"))

    def entry(self) -> Entry:
        return NormedEmbeddings(self.config.rms_norm_eps)

    def last_norm(self) -> Norm:
        weight = self.weights.norm(self.final_norm, self.config.hidden_size, offset=0.0)
        return RMSNorm(weight, self.config.rms_norm_eps)

    def layer(self, index: int) -> Layer:
        """Norms before and after both blocks; those after have an epsilon of their own."""
        path, eps = f"model.layers.{index}", self.config.fields.number("post_norm_eps", low=0.0)
        before = ("input_layernorm", "pre_feedforward_layernorm")
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        return ResidualLayer(
            self.mixer(index),
            self.mlp(index),
            before=[self.norm(f"{path}.{name}") for name in before],
            after=[self.norm(f"{path}.{name}", eps=eps) for name in after],
        )

    def head_norm_weight(self, index: int) -> mx.array:
        """Queries are scaled, keys are not: (num_heads + num_kv_heads, head_dim)."""
        config, dtype = self.config, self.weights.dtype
        kv_heads, dim = config.heads_of(index)
        factor = config.fields.number("qk_scale_factor", above=0.0)
        queries = mx.full((config.num_heads, dim), factor, dtype)
        return mx.concatenate([queries, mx.ones((kv_heads, dim), dtype)])

    def attention_inputs(self, index: int) -> tuple[Projection, Projection | None]:
        return self.qkv(index), self.gates(index, "gate_proj")


class NormedEmbeddings:
    """Embeddings divided by their root mean square."""

    __slots__ = ("_eps",)

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def __call__(self, ids: mx.array, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the same shape."""
        return mx.fast.rms_norm(x, None, self._eps)
