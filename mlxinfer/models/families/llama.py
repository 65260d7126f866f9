"""Llama 2 and 3, and Mistral."""

from typing import ClassVar

from ..family import Family
from ..jsonfields import Fields
from ..rope_config import FULL


class Llama(Family):
    """Llama 2 and 3. A window in the config is not used."""

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """Every layer sees everything."""
        return [FULL] * num_layers


class Mistral(Family):
    """Mistral: windows where the config states them, and never a bias."""

    defaults: ClassVar = {"sliding_window": 4096, "num_key_value_heads": 8}

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """None."""
        return False, False
