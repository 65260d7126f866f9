"""Granite 3, dense: Llama with four multipliers (of embeddings, scores, residuals and logits)."""

from dataclasses import replace
from typing import ClassVar

from ..config import ModelConfig
from ..decoder import Layer, PreNormLayer
from ..family import Family


class Granite(Family):
    """Each multiplier is 1 where the config does not state it."""

    defaults: ClassVar = {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    }

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """The scale of the scores is stated, not derived from the head's size."""
        return replace(
            config,
            attention_scale=config.fields.number("attention_multiplier", above=0.0),
            logit_scale=1 / config.fields.number("logits_scaling", above=0.0),
        )

    @property
    def embed_scale(self) -> float:
        """embedding_multiplier."""
        return self.config.fields.number("embedding_multiplier")

    def layer(self, index: int) -> Layer:
        """Both blocks' outputs are scaled before they are added to the residual stream."""
        path = f"model.layers.{index}"
        return PreNormLayer(
            self.norm(f"{path}.input_layernorm"),
            self.mixer(index),
            self.norm(f"{path}.post_attention_layernorm"),
            self.mlp(index),
            scale=self.config.fields.number("residual_multiplier"),
        )
