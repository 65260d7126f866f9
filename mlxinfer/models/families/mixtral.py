"""Mixtral and MiniMax M2: experts in every layer, with projections that are named w1, w2 and w3."""

from typing import ClassVar

from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...layers.rope import RopeSpec
from ...metal_kernels.routing import Routing
from ..family import Family, with_wide_norms
from ..jsonfields import Fields
from .deepseek import PLAIN_ROUTING, biased_routing

PROJECTIONS = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}  # of an expert


class Mixtral(Family):
    """Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
    }
    ignored = ("attention_bias",)
    names = PROJECTIONS

    def mlp(self, index: int) -> FeedForward:
        choose = ExpertChoice(Routing(self.config.experts_per_token, normalised=True))
        return self.experts(f"model.layers.{index}.block_sparse_moe", choose)


class MiniMaxM2(Family):
    """MiniMax M2 and M2.5: QK-norm over all heads at once, partial RoPE, a biased router."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5_000_000.0,
        "max_position_embeddings": 196_608,
    }
    ignored: ClassVar[tuple[str, ...]] = ("attention_bias", "sliding_window", *PLAIN_ROUTING)
    with_norms = with_wide_norms
    names: ClassVar = {
        **PROJECTIONS,
        ".block_sparse_moe.e_score_": ".block_sparse_moe.gate.e_score_",
    }

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        key, stated = "partial_rotary_factor", fields.get("rope_parameters") or {}
        if stated.get(key, fields.get(key)) is None and fields.get("rotary_dim") is not None:
            part = fields.integer("rotary_dim", high=head_dim) / head_dim
            fields = Fields({**fields.values, key: part}, fields.where)
        return super().rope_spec(fields, layer_type, head_dim)

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}.block_sparse_moe"
        return self.experts(path, biased_routing(self, path))
