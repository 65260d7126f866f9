"""Ling 3.0: delta attention with a bounded decay, latent attention with gates, limited experts."""

from collections.abc import Sequence
from typing import ClassVar

from ...layers.latent_attention import LatentAttention
from ...layers.linear import Projection
from ...layers.mlp import FeedForward, Gated, limited_swiglu
from ...layers.rope import RopeSpec
from ..config import ModelConfig
from ..family import Family, MTPForm
from ..jsonfields import Fields
from .kimi_linear import KimiLinear


class BailingHybrid(KimiLinear):
    """Ling 3.0 tiny and flash.

    `expert_swiglu_limit_list` and `share_expert_swiglu_limit_list` limit the activations of some
    layers' experts. The vendor's code applies them; transformers 5.24 ignores them.
    """

    defaults: ClassVar = {
        **KimiLinear.defaults,
        "n_routed_experts": 512,
        "moe_intermediate_size": 768,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6_000_000.0,
        "max_position_embeddings": 262_144,
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "rope_interleave": True,
    }
    mtp = MTPForm()
    names: ClassVar = {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.": ".self_attn.",
        ".self_attn.dense.": ".self_attn.o_proj.",
        ".self_attn.forget_gate.": ".self_attn.",
        ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    }

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        fields = super().language_model(config)
        heads = fields.integer("num_attention_heads", high=2**14, default=32)
        dim = fields.integer("linear_head_dim", "head_dim", high=2**14, default=128)
        length = fields.integer("short_conv_kernel_size", low=2, high=64, default=4)
        num_layers = fields.integer("num_hidden_layers", high=2000)
        group = fields.integer("layer_group_size", high=2000, default=6)
        attending = [i + 1 for i in range(num_layers) if (i + 1) % group == 0]
        stated = {
            "linear_num_heads": heads,
            "linear_head_dim": dim,
            "linear_conv_kernel_dim": length,
            "full_attn_layers": attending,  # counted from 1
        }
        return Fields({**stated, **fields.values}, fields.where)

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        return (cls.rope_spec(fields, layer_types[0], head_dim),) * len(layer_types)

    def attention(self, index: int, **parts: object) -> LatentAttention:
        gates = self.gates(index, "g_proj", by_head=True)
        return super().attention(index, **parts, gate_proj=gates)

    @property
    def decay_bound(self) -> float:
        fields = self.config.fields
        if not fields.boolean("kda_safe_gate"):
            return 0.0
        return fields.number("kda_lower_bound", low=-1e4, high=0.0)

    def through(self, path: str, dims: int, width: int) -> Sequence[Projection]:
        return (self.weights.linear(f"{path}_proj", width, self.config.hidden_size),)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        if not config.sparse_layers[index]:
            return Family.mlp(self, index)
        fields = config.fields
        inner = fields.integer(
            "moe_shared_expert_intermediate_size", "moe_intermediate_size", high=2**22
        )  # fmt: skip
        count = fields.integer("n_shared_experts", high=2**10)
        limit = limited(config, "share_expert_swiglu_limit_list", index)
        return self.experts(
            path,
            self.routing(path),
            shared=self.dense_mlp(f"{path}.shared_experts", inner * count, activation=limit),
            activation=limited(config, "expert_swiglu_limit_list", index),
        )


def limited(config: ModelConfig, key: str, index: int) -> Gated | None:
    """The activation with the limit that a list states for a layer; None: there is none."""
    limit = config.listed(key, index)
    return limited_swiglu(float(limit)) if limit else None
