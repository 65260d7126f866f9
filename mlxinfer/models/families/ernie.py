"""ERNIE 4.5, dense: Llama with rotary pairs side by side."""

from dataclasses import replace
from typing import ClassVar

from ..config import ModelConfig
from ..family import Family
from ..jsonfields import Fields


class Ernie4_5(Family):
    """One field states all biases."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "use_bias": False,
        "tie_word_embeddings": True,
    }
    interleaved = True

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """As stated."""
        return fields.boolean("use_bias"), fields.boolean("use_bias")

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """The feed-forward blocks' biases too."""
        return replace(config, mlp_bias=config.fields.boolean("use_bias"))
