"""Cohere 2: parallel blocks, layer norms, positions in windowed layers only.

Command R7B and A; with experts Command A+ and North Mini Code.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice, WeighedExpert
from ...layers.norm import LayerNorm, Norm
from ...layers.rope import RopeSpec
from ...layers.step import Layer
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig, read_rope
from ..decoder import ParallelLayer
from ..family import Family, in_windows, pairs_apart
from ..jsonfields import Fields
from .deepseek import sparse_layers

RMS_NORMS = "rms_norms"  # our own key


class Cohere2(Family):
    """Three layers of four have a window; the fourth sees everything, without positions."""

    defaults: ClassVar = {
        "num_attention_heads": 64,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    head_order = pairs_apart
    layers_with_rope = staticmethod(in_windows)

    @classmethod
    def head_dim(cls, fields: Fields, num_heads: int) -> int:
        without = {key: value for key, value in fields.values.items() if key != "head_dim"}
        return super().head_dim(Fields(without, fields.where), num_heads)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, logit_scale=config.fields.number("logit_scale"))

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> Norm:
        width = self.config.hidden_size if dims is None else dims
        stated = self.config.fields.number("layer_norm_eps", low=0.0, high=1.0)
        weight = self.weights.take(f"{path}.weight", (width,))
        return LayerNorm(weight, stated if eps is None else eps)

    def layer(self, index: int) -> Layer:
        norm = self.norm(f"model.layers.{index}.input_layernorm")
        return ParallelLayer(norm, self.mixer(index), self.mlp(index))


class Cohere2MoE(Cohere2):
    """Experts in all but the first layers, and a shared one that is averaged with them."""

    defaults: ClassVar = {
        **Cohere2.defaults,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "prefix_dense_sliding_window_pattern": 1,
    }
    dense_matrices = (".mlp.gate",)

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """With a note whether norms are RMS norms: then the config states their epsilon."""
        values = {**config.values, RMS_NORMS: config.get("rms_norm_eps") is not None}
        if not values[RMS_NORMS]:  # transformers 5 writes null
            values.pop("rms_norm_eps", None)
        return Fields(values, config.where)

    @classmethod
    def head_dim(cls, fields: Fields, num_heads: int) -> int:
        return fields.integer("head_dim", high=2**14)

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """The dense layers have a period of their own, and the others theirs."""
        first = min(fields.integer("first_k_dense_replace", low=0), num_layers)
        periods = ("prefix_dense_sliding_window_pattern", "sliding_window_pattern")
        kinds: list[str] = []
        for key, count in zip(periods, (first, num_layers - first), strict=True):
            period = fields.integer(key, high=2**20)
            kinds += [SLIDING if (i + 1) % period else FULL for i in range(count)]
        return kinds

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """Dense layers that see everything have positions too, where all of them do."""
        all_have_rope = fields.integer("prefix_dense_sliding_window_pattern") == 1
        rope = read_rope(fields, SLIDING, head_dim=head_dim)
        sparse = sparse_layers(fields, len(layer_types))
        return tuple(
            rope if kind == SLIDING or (all_have_rope and not has_experts) else None
            for kind, has_experts in zip(layer_types, sparse, strict=True)
        )

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        sparse = sparse_layers(config.fields, config.num_layers)
        return replace(super().configure(config), sparse_layers=sparse)

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> Norm:
        """An RMS norm where the config states its epsilon, else a layer norm."""
        if self.config.fields.boolean(RMS_NORMS):
            return Family.norm(self, path, dims, eps)
        return super().norm(path, dims, eps)

    def mlp(self, index: int) -> FeedForward:
        config, fields, path = self.config, self.config.fields, f"model.layers.{index}.mlp"
        if not config.sparse_layers[index]:
            inner = fields.integer("prefix_dense_intermediate_size", high=2**22)
            return self.dense_mlp(path, inner)
        count = fields.integer("num_shared_experts", low=0, high=2**10)
        averages = fields.text("shared_expert_combination_strategy") == "average"
        weight = 0.5 if count and averages else 1.0
        shared: FeedForward | None = None
        if count:
            shared = self.dense_mlp(f"{path}.shared_experts", config.intermediate_size * count)
            shared = WeighedExpert(shared, weight) if averages else shared
        sigmoid = fields.text("expert_selection_fn") == "sigmoid"
        routing = Routing(
            config.experts_per_token,
            sigmoid=sigmoid,
            normalised=config.norm_topk_prob or not sigmoid,
            factor=weight,
        )
        return self.experts(path, ExpertChoice(routing), shared=shared)
