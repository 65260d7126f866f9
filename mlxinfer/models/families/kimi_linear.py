"""Kimi Linear: delta attention, and every few layers latent attention without positions."""

import re
from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from ...cache_specs import StateSpec
from ...layers.attention import LayerMixer
from ...layers.gated_delta import KimiDelta
from ...layers.linear import Projection
from ..config import FULL, ModelConfig
from ..family import MTPForm, no_positions
from ..jsonfields import Fields
from .deepseek import PLAIN_ROUTING, DeepseekV3
from .mixtral import PROJECTIONS
from .recurrent import joint_conv, with_states

_RECURRENT = "linear_attention"
_NAMES = {  # of the config, and what DeepSeek calls the same
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
}
_DELTA = {  # of its linear_attn_config, and as transformers 5 has it
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_CONV = re.compile(r"\.([qkv])_conv(?:1d|\.conv)\.")  # of the hub, and of MLX


class KimiLinear(DeepseekV3):
    """Delta attention and latent attention, with DeepSeek V3's experts in one group."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1_048_576,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_interleave": False,  # there is no rope
    }
    mtp: ClassVar[MTPForm | None] = None  # no definition of one is published
    ignored = ("sliding_window",)
    rope_specs = staticmethod(no_positions)
    keys = _NAMES
    names: ClassVar = {
        **PROJECTIONS,
        ".block_sparse_moe.": ".mlp.",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    }

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The config with `linear_attn_config` beside the others."""
        fields, delta = super().language_model(config), config.fields("linear_attn_config")
        if delta is None:
            return fields
        attending = {"full_attn_layers": delta.items("full_attn_layers")}
        return Fields({**attending, **fields.values, **delta.stated(_DELTA)}, fields.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        recurs = _recurs(config.fields, config.num_layers)
        return with_states(super().configure(config), _state(config.fields), recurs)

    @classmethod
    def rename(cls, name: str) -> str | None:
        return super().rename(_CONV.sub(r".\1_conv1d.", name))

    def mixer(self, index: int) -> LayerMixer:
        state = self.config.states[index]
        if state is None:
            return super().mixer(index)
        config, weights, path = self.config, self.weights, f"model.layers.{index}.self_attn"
        heads, dim, _ = state.shapes[1][0]
        width, hidden = heads * dim, config.hidden_size
        raw, rates = weights.raw, f"{path}.A_log"
        flat = rates in weights and len(weights.shape(rates)) == 1
        log_rate = raw(rates, (heads,) if flat else (1, 1, heads, 1))
        return KimiDelta(
            in_proj=weights.fused(
                [f"{path}.{name}_proj" for name in "qkvb"], [width] * 3 + [heads], hidden
            ),
            decay_projs=self.through(f"{path}.f", dim, width),
            gate_projs=self.through(f"{path}.g", dim, width),
            out_proj=weights.linear(f"{path}.o_proj", hidden, width),
            conv=joint_conv(self, path, state, [width] * 3),
            norm=self.norm(f"{path}.o_norm", dim),
            log_rate=log_rate.reshape(heads).astype(mx.float32),
            step_bias=raw(f"{path}.dt_bias", (width,)).astype(mx.float32),
            spec=state,
            bound=self.decay_bound,
        )

    @property
    def decay_bound(self) -> float:
        """The bound of the logarithm of decays; 0: there is none."""
        return 0.0

    def through(self, path: str, dims: int, width: int) -> Sequence[Projection]:
        """A projection to few numbers, and from these to many."""
        down = self.weights.linear(f"{path}_a_proj", dims, self.config.hidden_size)
        return down, self.weights.linear(f"{path}_b_proj", width, dims)


def _recurs(fields: Fields, num_layers: int) -> list[bool]:
    """For each layer, whether it is recurrent: by a list of either kind, counted from 1."""
    stated = fields.by_layer("layer_types", count=num_layers, known=(_RECURRENT, FULL))
    if stated is not None:
        return [kind == _RECURRENT for kind in stated]
    attending = fields.items("full_attn_layers")
    if attending is None:
        return [i == 0 or i % 4 != 0 for i in range(num_layers)]
    return [i + 1 not in attending for i in range(num_layers)]


def _state(fields: Fields) -> StateSpec:
    """The state of one recurrent layer: the convolution's inputs, and a matrix for each head."""
    heads = fields.integer("linear_num_heads", high=2**14)
    dim = fields.integer("linear_head_dim", high=2**14)
    length = fields.integer("linear_conv_kernel_dim", low=2, high=64)
    return StateSpec((((length - 1, 3 * heads * dim), "float32"), ((heads, dim, dim), "float32")))
