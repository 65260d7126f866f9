"""Cohere 2 (Command R7B and A): parallel blocks, layer norms, positions in windowed layers only."""

from dataclasses import replace
from typing import ClassVar

from ...layers.norm import LayerNorm
from ...layers.rope import RopeSpec
from ...layers.step import Layer
from ..config import FULL, ModelConfig
from ..decoder import ParallelLayer
from ..family import Family
from ..jsonfields import Fields


class Cohere2(Family):
    """Three layers of four have a window; the fourth sees everything, without positions."""

    defaults: ClassVar = {
        "num_attention_heads": 64,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    interleaved = True

    @classmethod
    def head_dim(cls, fields: Fields, num_heads: int) -> int:
        """Always the share of the hidden size."""
        without = {key: value for key, value in fields.values.items() if key != "head_dim"}
        return super().head_dim(Fields(without, fields.where), num_heads)

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        """None in layers that see everything."""
        return None if layer_type == FULL else super().rope_spec(fields, layer_type, head_dim)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Logits are scaled as stated."""
        return replace(config, logit_scale=config.fields.number("logit_scale"))

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> LayerNorm:
        """A layer norm without a bias."""
        width = self.config.hidden_size if dims is None else dims
        stated = self.config.fields.number("layer_norm_eps", low=0.0, high=1.0)
        weight = self.weights.take(f"{path}.weight", (width,))
        return LayerNorm(weight, stated if eps is None else eps)

    def layer(self, index: int) -> Layer:
        """One norm for both blocks."""
        norm = self.norm(f"model.layers.{index}.input_layernorm")
        return ParallelLayer(norm, self.mixer(index), self.mlp(index))
