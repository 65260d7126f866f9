"""OLMo 2: norms after the blocks instead of before, and QK-norm over all heads at once."""

from typing import ClassVar

from ...layers.norm import Norm, WideQKNorm
from ..decoder import Layer, PostNormLayer
from ..family import Family


class Olmo2(Family):
    """Post-norm layers (arXiv 2501.00656)."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    def layer(self, index: int) -> Layer:
        """Each block's output is normalised before it is added to the residual stream."""
        path = f"model.layers.{index}"
        return PostNormLayer(
            self.mixer(index),
            self.norm(f"{path}.post_attention_layernorm"),
            self.mlp(index),
            self.norm(f"{path}.post_feedforward_layernorm"),
        )

    def qk_norm(self, path: str) -> Norm:
        """One norm over the whole of Q, and one over the whole of K."""
        config, dim = self.config, self.config.head_dim
        return WideQKNorm(
            self.norm(f"{path}.q_norm", config.num_heads * dim),
            self.norm(f"{path}.k_norm", config.num_kv_heads * dim),
            config.num_heads,
        )
