"""OLMo 2 and 3: norms after the blocks instead of before, and QK-norm over all heads at once."""

from typing import ClassVar

from ...layers.norm import Norm
from ...layers.rope import RopeSpec
from ..decoder import Layer, ResidualLayer
from ..family import Family
from ..jsonfields import Fields
from ..rope_config import SLIDING


class Olmo2(Family):
    """Post-norm layers (arXiv 2501.00656)."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    def layer(self, index: int) -> Layer:
        """Each block's output is normalised before it is added to the residual stream."""
        path = f"model.layers.{index}"
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        norms = [self.norm(f"{path}.{name}") for name in names]
        return ResidualLayer(self.mixer(index), self.mlp(index), after=norms)

    def qk_norm(self, index: int) -> Norm:
        """One norm over the whole of Q, and one over the whole of K."""
        return self.wide_qk_norm(index)


class Olmo3(Olmo2):
    """OLMo 2 with windows in three layers of four; positions of these are never stretched."""

    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 500_000.0,
    }

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        """`rope_scaling` is for layers that see everything."""
        if layer_type == SLIDING:
            fields = Fields({**fields.values, "rope_scaling": None}, fields.where)
        return super().rope_spec(fields, layer_type, head_dim)
