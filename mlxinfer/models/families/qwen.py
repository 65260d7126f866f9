"""Qwen 2 and 3, dense and as mixtures of experts, and Mellum 2."""

from dataclasses import replace
from typing import ClassVar

from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig, read_layer_types
from ..experts import TransposedExperts
from ..family import Family, HeadNorms, MTPForm
from ..jsonfields import Fields
from .deepseek import sparse_layers


class _Qwen(Family):
    """Windows count only where `use_sliding_window` says so."""

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        used = fields.boolean("use_sliding_window", default=False)
        return super().layer_types(fields, num_layers) if used else [FULL] * num_layers

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """The layers from `max_window_layers` on have the window."""
        first = fields.integer("max_window_layers", low=0, default=28)
        return [SLIDING if i >= first else FULL for i in range(num_layers)]


class Qwen2(_Qwen):
    """Qwen 2 and 2.5: biases on Q, K and V."""

    defaults: ClassVar = {"num_key_value_heads": 32, "sliding_window": 4096, "attention_bias": True}
    ignored = ("attention_bias",)
    biases = ("attention_bias", None)


class Qwen3(_Qwen):
    """Qwen 3, dense: an RMS norm over each head of Q and K."""

    defaults: ClassVar = {
        "head_dim": 128,
        "sliding_window": 4096,
        "mrope_interleaved": True,  # in Qwen3-VL
    }
    head_norms = HeadNorms()


class Qwen3MoE(_Qwen):
    """Qwen 3 with a router and experts in place of (some) MLPs."""

    defaults: ClassVar = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "mrope_interleaved": True,  # in Qwen3-VL-MoE
    }
    head_norms = HeadNorms()
    packed_experts = TransposedExperts()  # where they are stacks: inside of Qwen3-VL

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        return [SLIDING] * num_layers

    def mlp(self, index: int) -> FeedForward:
        config, k = self.config, self.config.experts_per_token
        if not config.num_experts or not config.sparse_layers[index]:
            return super().mlp(index)
        choose = ExpertChoice(Routing(k, normalised=config.norm_topk_prob))
        return self.experts(f"model.layers.{index}.mlp", choose)


class Mellum(Qwen3MoE):
    """Mellum 2: windows, and a rope for each kind of layer."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
        "rope_parameters": {FULL: {"rope_theta": 500_000.0}, SLIDING: {"rope_theta": 10_000.0}},
        "mtp_layer_types": [SLIDING],
    }
    mtp = MTPForm()

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """As stated; else all layers see everything."""
        stated = fields.items("layer_types") is not None
        return read_layer_types(fields, num_layers) if stated else [FULL] * num_layers

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, sparse_layers=sparse_layers(config.fields, config.num_layers))
