"""Mixtral: Mistral with a mixture of experts in every layer."""

import re
from typing import ClassVar

from ...layers.mlp import FeedForward
from ...layers.moe import top_k_softmax
from ..family import Family
from ..jsonfields import Fields

_PROJECTION = re.compile(r"(\.block_sparse_moe\.(?:experts\.\d+|switch_mlp)\.)w([123])\.")
_NAMES = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}


def name_projections(name: str) -> str:
    """A tensor's name with `gate_proj`, `down_proj` and `up_proj` for an expert's w1, w2 and w3."""
    return _PROJECTION.sub(lambda found: f"{found[1]}{_NAMES[found[2]]}.", name)


class Mixtral(Family):
    """Mixtral 8x7B and 8x22B."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
    }

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """None."""
        return False, False

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Experts' projections by what they are."""
        return name_projections(name)

    def mlp(self, index: int) -> FeedForward:
        """A softmax over the best experts."""
        choose = top_k_softmax(self.config.experts_per_token)
        return self.experts(f"model.layers.{index}.block_sparse_moe", choose)
