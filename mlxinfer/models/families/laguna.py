"""Laguna: query heads by layer, gates of softplus, ropes and windows by kind of layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ...errors import CheckpointError
from ...layers.attention import AttentionArgs
from ...layers.linear import Projection
from ...layers.mlp import FeedForward, softplus
from ...layers.moe import ExpertChoice
from ..config import FULL, SLIDING, ModelConfig
from ..family import Family
from ..jsonfields import Fields
from .biased_experts import Dots1
from .deepseek import PLAIN_ROUTING, biased_routing


class Laguna(Dots1):
    """Laguna XS, S and M: the experts of DeepSeek V3 beside a shared one.

    Attributes:
        supported: values of settings that would change the answers.
    """

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_theta": 10_000.0},
        },
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "gating": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_router_logit_softcapping": 0.0,
        "first_k_dense_replace": 1,
    }
    supported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "gating": (True, "per-head", "per-element"),
        "moe_router_score_func": ("sigmoid",),
        "moe_apply_router_weight_on_input": (False,),
    }
    names: ClassVar = {
        ".mlp.gate.proj.": ".mlp.gate.",
        ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    }

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        return [FULL] * num_layers

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config.fields.require(cls.supported)
        return with_query_heads(super().configure(config), cls.query_heads(config))

    @classmethod
    def query_heads(cls, config: ModelConfig) -> Sequence[int]:
        return config.fields.items("num_attention_heads_per_layer") or ()

    def attention_inputs(self, index: int) -> tuple[Projection, Projection | None]:
        by_head = self.config.fields.get("gating") != "per-element"
        return self.qkv(index), self.gates(index, "g_proj", by_head=by_head)

    def attention_args(self, index: int) -> AttentionArgs:
        return replace(super().attention_args(index), gate=softplus)

    def mlp(self, index: int) -> FeedForward:
        fields, path = self.config.fields, f"model.layers.{index}.mlp"
        if not self.config.sparse_layers[index]:
            return Family.mlp(self, index)
        choose = biased_routing(self, path)
        cap = fields.number("moe_router_logit_softcapping", low=0.0)
        inner = fields.integer("shared_expert_intermediate_size", high=2**22)
        return self.experts(
            path,
            ExpertChoice(choose.routing, choose.bias, soft_cap=cap or None),
            shared=self.dense_mlp(f"{path}.shared_expert", inner),
        )


def with_query_heads(config: ModelConfig, heads: Sequence[int]) -> ModelConfig:
    """The config with these query heads by layer; empty: as many as the config states."""
    kv_heads, count = config.num_kv_heads, config.num_layers
    sound = all(type(n) is int and 0 < n < 2**14 and not n % kv_heads for n in heads)
    if not sound or len(heads) not in (0, count):
        raise CheckpointError(
            f"{config.fields.where} states query heads of layers as {str(heads)[:60]}; expected "
            f"{count} multiples of num_key_value_heads, {kv_heads}."
        )
    return replace(config, query_heads=tuple(heads))
