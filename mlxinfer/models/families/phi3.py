"""Phi 3, 3.5 and 4 mini: packed projections, and long RoPE chosen by each request's length.

The reference recomputes its frequencies in the middle of an answer that grows past the original
context, while the keys before stay as they were. Here a sequence keeps the frequencies that its
greatest possible length asks for; see `Model.rope_variant`.
"""

from typing import ClassVar

from ...layers.linear import Projection
from ...layers.mlp import FeedForward
from ..family import Family
from ..jsonfields import Fields


class Phi3(Family):
    """Q, K and V are one tensor in the checkpoint, and so are gate and up."""

    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    }

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """None."""
        return False, False

    def qkv(self, index: int) -> Projection:
        """As stored."""
        config, path = self.config, f"model.layers.{index}.self_attn"
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        widths = [count * config.head_dim for count in heads]
        return self.weights.linear(
            f"{path}.qkv_proj", sum(widths), config.hidden_size, parts=widths
        )

    def mlp(self, index: int) -> FeedForward:
        """gate_up_proj, the gate first, and down_proj."""
        return self.packed_mlp(f"model.layers.{index}.mlp", self.config.intermediate_size)
