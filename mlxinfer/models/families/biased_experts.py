"""Experts chosen by score plus bias, behind attention of other families.

dots.llm1, Hy3, Trinity, K-EXAONE, Kolibri 1 and ERNIE 4.5 with experts.
"""

from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...layers.linear import Linear, Projection
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig
from ..family import Family, HeadNorms, MTPForm, in_windows, root_of_width
from ..jsonfields import Fields
from .deepseek import PLAIN_ROUTING, V3Experts, biased_routing, shared_expert
from .glm import Glm4
from .llama import Ernie4_5
from .olmo import Exaone4

V3_KEYS = {  # of configs, and DeepSeek's for the same things
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "router_scaling_factor": "routed_scaling_factor",
    "route_scale": "routed_scaling_factor",
    "moe_routed_scaling_factor": "routed_scaling_factor",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "route_norm": "norm_topk_prob",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "norm_expert_weight": "norm_topk_prob",
}


class Dots1(V3Experts):
    """dots.llm1: the attention of Qwen 3, the experts of DeepSeek V3."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    }
    head_norms: ClassVar[HeadNorms | None] = HeadNorms()
    keys: ClassVar = V3_KEYS
    names: ClassVar = {
        f".mlp.experts.{kind}_proj.": f".mlp.switch_mlp.{kind}_proj."
        for kind in ("gate", "up", "down")
    }

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """The layers from `max_window_layers` on have the window."""
        first = fields.integer("max_window_layers", low=0)
        return [SLIDING if i >= first else FULL for i in range(num_layers)]


class HyV3(V3Experts):
    """Hy3: the attention of Qwen 3, the experts of DeepSeek V3 in all layers but the first."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 8,
        "n_routed_experts": 192,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.826,
    }
    mtp = MTPForm()
    head_norms = HeadNorms()
    ignored: ClassVar[tuple[str, ...]] = ("sliding_window",)
    keys = V3_KEYS
    names: ClassVar = {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    }


class Afmoe(HyV3):
    """Trinity: a gate on attention's outputs, norms around both blocks, windows with positions."""

    defaults: ClassVar = {
        **HyV3.defaults,
        "num_key_value_heads": None,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 16_384,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 6,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "mup_enabled": False,
    }
    ignored = ()
    layers_with_rope = staticmethod(in_windows)
    keys = V3_KEYS | {"global_attn_every_n_layers": "sliding_window_pattern"}
    block_norms = (
        "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
    )  # fmt: skip

    def embed_scale(self) -> float | None:
        return root_of_width(self) if self.config.fields.boolean("mup_enabled") else None

    def attention_inputs(self, index: int) -> tuple[Projection, Projection | None]:
        return self.qkv(index), self.gates(index, "gate_proj")


class ExaoneMoE(V3Experts, Exaone4):
    """K-EXAONE: the attention of EXAONE 4 behind norms, the experts of DeepSeek V3."""

    defaults: ClassVar = {
        **Exaone4.defaults,
        **PLAIN_ROUTING,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
    }
    block_norms = Family.block_norms
    keys = V3_KEYS
    names: ClassVar = {".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"}


class Kolibri1(Exaone4):
    """Kolibri 1: the attention of EXAONE 4 between norms, experts chosen by logits plus bias.

    Every layer has experts, beside one that all tokens go to.
    """

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "sliding_window": 513,
        "sliding_window_pattern": 5,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # of no layer
    }
    mtp = None
    dense_matrices = (".mlp.gate",)
    block_norms = Glm4.block_norms
    names: ClassVar = {  # published, and ours
        ".moe.router.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".post_attn_norm.": ".post_self_attn_layernorm.",
        ".post_ffn_norm.": ".post_mlp_layernorm.",
    }

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}.mlp"
        choice = biased_routing(self, path)
        routing = replace(choice.routing, ranks_logits=True)
        inner = self.config.fields.integer("shared_expert_intermediate_size", high=2**22)
        shared = self.dense_mlp(f"{path}.shared_experts", inner)
        return self.experts(path, ExpertChoice(routing, choice.bias), shared=shared)


class Ernie4_5MoE(Ernie4_5):
    """ERNIE 4.5 with experts: the softmax of all experts, and a bias that joins only the choice."""

    defaults: ClassVar = {
        **{key: value for key, value in Ernie4_5.defaults.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }
    mtp = MTPForm()
    dense_matrices = (".mlp.gate",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields, num_layers = config.fields, config.num_layers
        first = fields.integer("moe_layer_start_index", low=0)
        last = fields.integer("moe_layer_end_index", low=-1) % num_layers
        step = fields.integer("moe_layer_interval")
        num_experts = fields.integer("moe_num_experts", high=2**16)
        return replace(
            super().configure(config),
            num_experts=num_experts,
            experts_per_token=fields.integer("moe_k", high=num_experts),
            moe_intermediate_size=fields.integer("moe_intermediate_size", high=2**22),
            sparse_layers=tuple(
                first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)
            ),
        )

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        if not config.sparse_layers[index]:
            return super().mlp(index)
        bias = self.choice_bias(path).astype(mx.float32)
        routing = Routing(config.experts_per_token, normalised=True, biased=True)
        return self.experts(path, ExpertChoice(routing, bias), shared=shared_expert(self, path))

    def choice_bias(self, path: str) -> mx.array:
        """(E,) what joins the scores of experts in the choice."""
        name = f"{path}.moe_statics.e_score_correction_bias"
        return self.weights.raw(name, (1, self.config.num_experts))[0]


class Ernie4_5VLMoE(Ernie4_5MoE):
    """The text of ERNIE 4.5 VL: experts of pictures follow those of texts, and are left out."""

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The first of the values stated for texts and for pictures."""
        values = {
            key: value[0] if key.startswith("moe_") and isinstance(value, list) else value
            for key, value in config.values.items()
        }
        kinds = config.items("mlp_layer_types")
        if kinds is not None:
            if kinds != sorted(kinds):
                raise UnsupportedModelError(f"{config.where} has dense layers behind experts.")
            values["moe_layer_start_index"] = kinds.count("dense")
        return super().language_model(Fields(values, config.where))

    def mlp(self, index: int) -> FeedForward:
        self.weights.drop_below(self.unread(self.config, range(index, index + 1)))
        return super().mlp(index)

    @classmethod
    def unread(cls, config: ModelConfig, layers: range) -> list[str]:
        """As published, and as MLX has them."""
        count, names = config.num_experts, ["switch_mlp_1.", "gate_1.", "gate.weight_1"]
        names += ["e_score_correction_bias_1", *(f"experts.{i}." for i in range(count, 2 * count))]
        return [f"model.layers.{index}.mlp.{name}" for index in layers for name in names]

    def router(self, path: str) -> Projection:
        """Published with inputs first, and as MLX has it."""
        shape = self.config.hidden_size, self.config.num_experts
        if not self.weights.has_shape(f"{path}.weight", shape):
            return super().router(path)
        return Linear(mx.contiguous(self.weights.take(f"{path}.weight", shape).T))

    def choice_bias(self, path: str) -> mx.array:
        """Published for both kinds in one, and as MLX has it."""
        name, count = f"{path}.moe_statics.e_score_correction_bias", self.config.num_experts
        if name in self.weights:
            return self.weights.raw(name, (2, count))[0]
        return self.weights.raw(f"{path}.e_score_correction_bias", (count,))
