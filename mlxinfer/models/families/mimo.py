"""MiMo V2: KV heads by kind of layer, short values, sinks in layers with windows."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import AttentionArgs
from ...layers.linear import Projection
from ..config import FULL, SLIDING, ModelConfig
from ..family import MTPForm, learned_sinks
from ..jsonfields import Fields
from .biased_experts import V3_KEYS, Dots1
from .deepseek import PLAIN_ROUTING

_NAMES = {  # the vendor's, and those of other families
    "swa_rope_theta": "rope_local_base_freq",
    "layernorm_epsilon": "rms_norm_eps",
    "moe_layer_freq": "is_moe_layer",
}
_SAME = ("num_attention_heads", "head_dim", "v_head_dim")  # in layers with windows and without


class MiMoV2Flash(Dots1):
    """MiMo V2 Flash: the experts of DeepSeek V3 without a shared one."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 129,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "mtp_layer_types": [SLIDING],
    }
    mtp = MTPForm()
    biases = ("attention_bias", None)
    head_norms = None
    keys = V3_KEYS | _NAMES
    names: ClassVar = {".attention_sink_bias": ".sinks"}

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The config under the names of other families.

        The vendor's `sliding_window_size` leaves the token itself out, and its pattern of layers
        has 1 for windows. Where nothing is stated, the first layer and each sixth see everything.
        """
        values = dict(super().language_model(config).values)
        if config.get("sliding_window_size") is not None:
            values["sliding_window"] = 1 + config.integer("sliding_window_size")
        if config.items("layer_types") is None:
            count = config.integer("num_hidden_layers", high=2000)
            every_sixth = [i and (i + 1) % 6 for i in range(count)]
            pattern = config.items("hybrid_layer_pattern") or every_sixth
            values["layer_types"] = [SLIDING if windowed else FULL for windowed in pattern]
        return Fields(values, config.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields = config.fields
        for key in _SAME:
            if fields.get(f"swa_{key}") not in (None, fields.get(key)):
                raise UnsupportedModelError(
                    f"swa_{key} in {fields.where} is {fields.get(f'swa_{key}')}; expected {key}, "
                    f"{fields.get(key)}."
                )
        few = config.num_kv_heads
        many = fields.integer("swa_num_key_value_heads", high=2**14, default=2 * few)
        if config.num_heads % many:
            raise CheckpointError(
                f"num_attention_heads is {config.num_heads}, which {many} heads for K and V in "
                "layers with windows do not divide."
            )
        counts = [few if window is None else many for window in config.windows]
        return replace(
            super().configure(config),
            heads=tuple((count, config.head_dim) for count in counts),
            value_dim=fields.integer("v_head_dim", high=2**14),
        )

    def attention_args(self, index: int) -> AttentionArgs:
        args, fields = super().attention_args(index), self.config.fields
        scale: float | None = fields.number("attention_value_scale", default=None)
        if scale is not None:
            args.v_norm, args.make_heads = partial(mx.multiply, scale), None
        return args

    def sinks(self, index: int) -> mx.array | None:
        kind = "full" if self.config.windows[index] is None else "swa"
        stated = self.config.fields.boolean(f"add_{kind}_attention_sink_bias")
        return learned_sinks(self, index) if stated else None


class MiMoV2(MiMoV2Flash):
    """The texts of MiMo V2.5 and V2.6, as conversions to MLX have them."""

    defaults: ClassVar = {
        **MiMoV2Flash.defaults,
        "rope_theta": 10_000_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1_048_576,
    }

    def qkv(self, index: int) -> Projection:
        path = f"model.layers.{index}.self_attn.qkv_proj"
        if f"{path}.weight" in self.weights:
            raise UnsupportedModelError(
                f"{path} has the rows of Q, K and V in turn, for each of several machines, which "
                "only FP8 scales tell apart; `mlxinfer convert` reads those. Conversions to MLX "
                "have three matrices, and run."
            )
        return super().qkv(index)
