"""Step 3.5 and 3.7 Flash: query heads, ropes and limits of activations by layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx

from ...layers.attention import AttentionArgs
from ...layers.mlp import FeedForward
from ...layers.rope import RopeSpec
from ..config import FULL, ModelConfig, read_rope
from ..family import MTPForm
from ..jsonfields import Fields
from ..weights.weights import Weights
from .bailing import limited
from .deepseek import PLAIN_ROUTING, biased_routing
from .laguna import Laguna

_ROPE_LISTS = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
_NAMES = {  # of the hub and of mlx-lm, and ours
    ".moe.router_bias": ".mlp.gate.router_bias",
    ".moe.gate.": ".mlp.gate.",
    ".moe.": ".mlp.switch_mlp.",
    ".mlp.gate.gate.": ".mlp.gate.",
    ".router_bias": ".e_score_correction_bias",
}


class Step3p5(Laguna):
    """The text of both; norm weights are stored less one, but not by mlx-lm.

    `swiglu_limits` is of experts, `swiglu_limits_shared` of the shared one or of an MLP; 0: none.
    Lists may go on for layers that predict further ahead.
    """

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "first_k_dense_replace": 3,
    }
    supported: ClassVar = {"moe_router_activation": ("sigmoid",)}
    mtp = MTPForm(before_norm=True)  # as in vLLM and SGLang; transformers 5.24 reads them behind it
    names = _NAMES

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        paths = [f"model.layers.{i}.mlp.share_expert" for i in range(config.num_layers)]
        self._of_mlx = any(f"{path}.up_proj.weight" in weights for path in paths)
        self.norm_offset = 0.0 if self._of_mlx else 1.0

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        fields = super().language_model(config)
        count = fields.integer("num_hidden_layers", high=2000)
        renamed: dict[str, Any] = {
            "num_key_value_heads": fields.get("num_attention_groups", "num_key_value_heads") or 8
        }
        if stated := fields.text("moe_layers_enum", default=None):
            sparse = [name.strip() for name in stated.split(",")]
            renamed["mlp_layer_types"] = [str(i) in sparse for i in range(count)]
        if other := fields.fields("attention_other_setting"):
            renamed["num_sliding_attention_heads"] = other.get("num_attention_heads")
        for key in ("layer_types", "mlp_layer_types"):
            if kinds := fields.items(key):
                renamed[key] = kinds[:count]
        if further := (fields.items("layer_types") or [])[count:]:
            renamed["mtp_layer_types"] = further
        return Fields({**fields.values, **renamed}, fields.where)

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """By the lists for each layer; layers of `yarn_only_types` are stretched."""
        if fields.get("rope_parameters") is not None:
            return super().rope_specs(fields, layer_types, head_dim)
        stretched = fields.items("yarn_only_types") or [FULL]
        specs = []
        for index, kind in enumerate(layer_types):
            values = dict(fields.values)
            for key, one in _ROPE_LISTS.items():
                stated = values.get(key)
                if isinstance(stated, list):
                    values[one] = stated[index] if index < len(stated) else None
            if kind not in stretched:
                values["rope_scaling"] = None
            specs.append(read_rope(Fields(values, fields.where), kind, head_dim=head_dim))
        return tuple(specs)

    @classmethod
    def query_heads(cls, config: ModelConfig) -> Sequence[int]:
        heads = config.num_heads
        other = config.fields.integer("num_sliding_attention_heads", high=2**14, default=heads)
        return [heads if window is None else other for window in config.windows]

    def attention_args(self, index: int) -> AttentionArgs:
        return replace(super().attention_args(index), gate=mx.sigmoid)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}"
        limit = limited(config, "swiglu_limits_shared", index)
        if not config.sparse_layers[index]:
            return self.dense_mlp(f"{path}.mlp", config.intermediate_size, activation=limit)
        inner = config.fields.integer("share_expert_dims", "share_expert_dim", high=2**22)
        shared = f"{path}.mlp.share_expert" if self._of_mlx else f"{path}.share_expert"
        return self.experts(
            f"{path}.mlp",
            biased_routing(self, f"{path}.mlp"),
            shared=self.dense_mlp(shared, inner, activation=limit),
            activation=limited(config, "swiglu_limits", index),
        )
