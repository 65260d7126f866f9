"""Kolibri 1: the attention of EXAONE 4 between norms, experts chosen by logits plus bias."""

from dataclasses import replace
from typing import ClassVar

from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from .deepseek import PLAIN_ROUTING, biased_routing
from .glm import Glm4
from .olmo import Exaone4

_NAMES = {  # published, and ours
    ".moe.router.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".post_attn_norm.": ".post_self_attn_layernorm.",
    ".post_ffn_norm.": ".post_mlp_layernorm.",
}


class Kolibri1(Exaone4):
    """Kolibri 1: experts in every layer, beside one that all tokens go to."""

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
    names = _NAMES

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}.mlp"
        choice = biased_routing(self, path)
        routing = replace(choice.routing, ranks_logits=True)
        inner = self.config.fields.integer("shared_expert_intermediate_size", high=2**22)
        shared = self.dense_mlp(f"{path}.shared_experts", inner)
        return self.experts(path, ExpertChoice(routing, choice.bias), shared=shared)
