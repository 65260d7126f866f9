"""OLMo 2 and 3, and EXAONE 4: norms after the blocks instead of before."""

from typing import ClassVar

from ...errors import CheckpointError
from ...layers.norm import Norm
from ...layers.rope import RopeSpec
from ...layers.step import Layer
from ..config import FULL, SLIDING, read_layer_types
from ..decoder import ResidualLayer
from ..family import Family
from ..jsonfields import Fields


class PostNormFamily(Family):
    """Layers in which norms follow the blocks (arXiv 2501.00656)."""

    def layer(self, index: int) -> Layer:
        """Each block's output is normalised before it is added to the residual stream."""
        path = f"model.layers.{index}"
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        norms = [self.norm(f"{path}.{name}") for name in names]
        return ResidualLayer(self.mixer(index), self.mlp(index), after=norms)


class Olmo2(PostNormFamily):
    """OLMo 2."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    def qk_norm(self, index: int) -> Norm:
        """One norm over the whole of Q, and one over the whole of K."""
        return self.wide_qk_norm(index)


class Olmo3(Olmo2):
    """OLMo 2 with windows in three layers of four, whose positions are never stretched."""

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


class Exaone4(PostNormFamily):
    """EXAONE 4: QK-norm over each head; in its hybrids only windowed layers have positions.

    The small models have no windows, and then every layer has positions.
    """

    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    head_norms = True
    attention_biases = False

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """As stated, or by a pattern: a period, or letters such as "LLLG" that repeat."""
        pattern = fields.get("sliding_window_pattern")
        windowed = fields.get("sliding_window") is not None and pattern != 0
        if not windowed:
            return [FULL] * num_layers
        if fields.items("layer_types") is not None or not isinstance(pattern, str):
            return read_layer_types(fields, num_layers)
        if not pattern or set(pattern) - {"L", "G"}:
            raise CheckpointError(
                f"sliding_window_pattern in {fields.where} is {pattern[:40]!r}; expected L for "
                "layers with a window and G for others."
            )
        kinds = [SLIDING if letter == "L" else FULL for letter in pattern]
        return [kinds[i % len(kinds)] for i in range(num_layers)]

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        """None in layers that see everything beside windowed ones."""
        if layer_type == FULL and fields.get("sliding_window") is not None:
            return None
        return super().rope_spec(fields, layer_type, head_dim)
