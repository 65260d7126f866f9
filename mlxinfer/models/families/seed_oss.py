"""Seed-OSS: Llama with biases on Q, K and V."""

from typing import ClassVar

from ..family import Family
from ..jsonfields import Fields


class SeedOss(Family):
    """The output projection's bias is stated apart."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "max_position_embeddings": 524_288,
    }

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """As stated."""
        return fields.boolean("attention_bias"), fields.boolean("attention_out_bias")
