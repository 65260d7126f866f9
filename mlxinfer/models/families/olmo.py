"""OLMo 2 and 3, and EXAONE 4: norms after the blocks instead of before; OLMo Hybrid."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.attention import LayerMixer
from ...layers.gated_delta import GatedDeltaNet
from ...layers.rope import RopeSpec
from ..config import FULL, SLIDING, ModelConfig, read_layer_types
from ..family import Family, HeadNorms, MTPForm, with_wide_norms
from ..jsonfields import Fields
from .qwen_hybrid import conv_widths, value_heads, with_delta_states
from .recurrent import joint_conv

_NORMS = {  # of the hub, and of other families
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}


class PostNormFamily(Family):
    """Layers in which norms follow the blocks (arXiv 2501.00656)."""

    block_norms: ClassVar[tuple[str | None, ...]] = (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm"
    )  # fmt: skip


class Olmo2(PostNormFamily):
    """OLMo 2."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    ignored: ClassVar[tuple[str, ...]] = ("sliding_window",)
    with_norms = with_wide_norms


class Olmo3(Olmo2):
    """OLMo 2 with windows in three layers of four, whose positions are never stretched."""

    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 500_000.0,
    }
    ignored = ()

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        if layer_type == SLIDING:
            fields = Fields({**fields.values, "rope_scaling": None}, fields.where)
        return super().rope_spec(fields, layer_type, head_dim)


class OlmoHybrid(Olmo2):
    """Three Gated DeltaNet layers with norms before their blocks, then one layer of OLMo 3.

    There are no positions where the config states `rope_theta` as null.
    """

    defaults: ClassVar = {
        "max_position_embeddings": 65_536,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    }
    ignored = ("sliding_window",)
    names = _NORMS

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        stated = fields.get("rope_parameters") or {}
        if stated.get("rope_theta", fields.get("rope_theta")) is None:
            return None
        return super().rope_spec(fields, layer_type, head_dim)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Set the states of recurrent layers; their sizes follow from attention's."""
        fields, heads = config.fields, config.num_heads
        keys = fields.integer("linear_num_key_heads", default=heads)
        share = 3 * config.hidden_size // (4 * keys)
        key_dim = fields.integer("linear_key_head_dim", default=share)
        sizes = {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": fields.integer("linear_num_value_heads", default=heads),
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": fields.integer("linear_value_head_dim", default=2 * key_dim),
        }
        return with_delta_states(config, Fields({**fields.values, **sizes}, fields.where))

    def norm_names(self, index: int) -> Sequence[str | None]:
        recurs = self.config.states[index] is not None
        return Family.block_norms if recurs else self.block_norms

    def mixer(self, index: int) -> LayerMixer:
        state = self.config.states[index]
        if state is None:
            return super().mixer(index)
        weights, hidden = self.weights, self.config.hidden_size
        path, (heads, dim) = f"model.layers.{index}.linear_attn", value_heads(state)
        widths, doubles = conv_widths(state), self.config.fields.boolean("linear_allow_neg_eigval")
        return GatedDeltaNet(
            in_proj=weights.fused(
                [f"{path}.{name}_proj" for name in "qkvgba"],
                [*widths, heads * dim, heads, heads],
                hidden,
            ),
            out_proj=weights.linear(f"{path}.o_proj", hidden, heads * dim),
            conv=joint_conv(self, path, state, widths),
            norm=self.norm(f"{path}.o_norm", dim, eps=1e-5),
            log_rate=weights.raw(f"{path}.A_log", (heads,)).astype(mx.float32),
            step_bias=weights.raw(f"{path}.dt_bias", (heads,)).astype(mx.float32),
            spec=state,
            strongest=2.0 if doubles else 1.0,
        )


class Exaone4(PostNormFamily):
    """EXAONE 4: QK-norm over each head; in its hybrids only windowed layers have positions.

    The small models have no windows, and then every layer has positions.
    """

    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "mtp_layer_types": [SLIDING],
    }
    mtp: ClassVar[MTPForm | None] = MTPForm()  # EXAONE 4.5
    head_norms = HeadNorms()
    ignored = ("attention_bias",)

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """By a pattern: a period, or letters such as "LLLG" that repeat."""
        pattern = fields.get("sliding_window_pattern")
        if pattern == 0:
            return [FULL] * num_layers
        if not isinstance(pattern, str) or fields.get("sliding_window") is None:
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
        if layer_type == FULL and fields.get("sliding_window") is not None:
            return None
        return super().rope_spec(fields, layer_type, head_dim)
