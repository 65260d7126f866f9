"""Experts chosen by score plus bias, behind attention of other families.

dots.llm1, K-EXAONE and ERNIE 4.5 with experts.
"""

from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig, read_layer_types
from ..family import Family
from ..jsonfields import Fields
from .deepseek import biased_routing, shared_expert, with_experts
from .llama import Ernie4_5
from .olmo import Exaone4


class Dots1(Family):
    """dots.llm1: the attention of Qwen 3, the experts of DeepSeek V3."""

    defaults: ClassVar = {
        "sliding_window": 4096,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
    head_norms = True
    dense_matrices = (".mlp.gate",)

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """As stated; else the layers from `max_window_layers` on have the window."""
        if fields.get("sliding_window") is None or fields.items("layer_types") is not None:
            return read_layer_types(fields, num_layers)
        first = fields.integer("max_window_layers", low=0)
        return [SLIDING if i >= first else FULL for i in range(num_layers)]

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Set the layers that have experts."""
        return with_experts(config)

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Stacks of experts as other MLX checkpoints call them."""
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = name.replace(f".mlp.experts.{projection}.", f".mlp.switch_mlp.{projection}.")
        return super().rename(name)

    def mlp(self, index: int) -> FeedForward:
        """An MLP in the first layers, then experts and shared experts."""
        path = f"model.layers.{index}.mlp"
        if not self.config.sparse_layers[index]:
            return Family.mlp(self, index)
        return self.experts(path, biased_routing(self, path), shared=shared_expert(self, path))


class ExaoneMoE(Exaone4):
    """K-EXAONE: the attention of EXAONE 4 behind norms, the experts of DeepSeek V3."""

    defaults: ClassVar = {
        **Exaone4.defaults,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
    }
    dense_matrices = (".mlp.gate",)
    layer = Family.layer
    mlp = Dots1.mlp

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """With the names of DeepSeek for the experts."""
        names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
        own = {ours: config.values[key] for key, ours in names.items() if key in config.values}
        return Fields({"n_shared_experts": 1, **config.values, **own}, config.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Layers have experts as `mlp_layer_types` or `is_moe_layer` lists; else all but a few."""
        config = with_experts(config)
        fields = config.fields
        stated = fields.items("mlp_layer_types") or fields.items("is_moe_layer")
        if stated is None:
            return config
        if len(stated) != config.num_layers:
            raise CheckpointError(
                f"mlp_layer_types in {fields.where} must have {config.num_layers} entries."
            )
        return replace(config, sparse_layers=tuple(kind in ("sparse", True) for kind in stated))

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Without the block that predicts further ahead; the bias as DeepSeek calls it."""
        if name.startswith("mtp."):
            return None
        return name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")


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
    dense_matrices = (".mlp.gate",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """The layers that have experts, and how many."""
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

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Without the blocks that predict further ahead."""
        return None if "mtp_" in name else super().rename(name)

    def mlp(self, index: int) -> FeedForward:
        """An MLP, or experts and shared experts."""
        config, path = self.config, f"model.layers.{index}.mlp"
        if not config.sparse_layers[index]:
            return super().mlp(index)
        name = f"{path}.moe_statics.e_score_correction_bias"
        bias = self.weights.raw(name, (1, config.num_experts)).astype(mx.float32)[0]
        routing = Routing(config.experts_per_token, normalised=True, biased=True)
        count = config.fields.integer("moe_num_shared_experts", low=0, high=2**10)
        shared = None
        if count:
            shared = self.dense_mlp(f"{path}.shared_experts", config.moe_intermediate_size * count)
        return self.experts(path, ExpertChoice(routing, bias), shared=shared)
