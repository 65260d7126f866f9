"""Hunyuan dense: Llama with a norm of Q and K behind the rope."""

from typing import ClassVar

from ..family import Family
from ..jsonfields import Fields
from ..rope_config import FULL


class HunYuanDense(Family):
    """Hunyuan 0.5B to 7B; `alpha` in rope_scaling raises the base of the rope."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    head_norms = True
    norm_last = True
    qk_norms = ("query_layernorm", "key_layernorm")

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """No layer has a window."""
        return [FULL] * num_layers
