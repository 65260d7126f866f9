"""Granite 3, with windows and sinks too, and Granite 4 with Mamba-2: Llama with multipliers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import mlx.core as mx

from ...layers.attention import LayerMixer
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...layers.rope import RopeSpec
from ...layers.step import Layer
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig, with_layer_thetas
from ..decoder import ResidualLayer
from ..family import Family, learned_sinks
from ..jsonfields import Fields
from .mamba import MambaDims, plain_mamba_mixer
from .recurrent import with_states

_RECURRENT = ("mamba", "linear_attention")
_ATTENTION = ("attention", FULL)
_NAMES = {  # ends of the checkpoint's names, and ours
    ".block_sparse_moe.input_linear.": ".block_sparse_moe.experts.gate_up_proj.",
    ".block_sparse_moe.output_linear.": ".block_sparse_moe.experts.down_proj.",
    ".router.layer.": ".router.",
    ".router.": ".router.layer.",
    ".shared_mlp.input_linear.": ".shared_mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
}


class Granite(Family):
    """Multipliers of embeddings, scores, residuals and logits, each 1 where it is not stated."""

    defaults: ClassVar = {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    }
    names = _NAMES
    ignored: ClassVar[tuple[str, ...]] = ("sliding_window",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """The scale of the scores is stated, not derived from the head's size."""
        return replace(
            config,
            attention_scale=config.fields.number("attention_multiplier", above=0.0),
            logit_scale=1 / config.fields.number("logits_scaling", above=0.0),
        )

    def embed_scale(self) -> float:
        return self.config.fields.number("embedding_multiplier")

    def layer(self, index: int) -> Layer:
        names = ("input_layernorm", "post_attention_layernorm")
        norms = [self.norm(f"model.layers.{index}.{name}") for name in names]
        scaled = partial(mx.multiply, self.config.fields.number("residual_multiplier"))
        blocks = self.mixer(index), self.mlp(index)
        return ResidualLayer(*blocks, before=norms, after=(scaled, scaled))


class GraniteHybrid(Granite):
    """Granite 4: Mamba-2 or attention, mostly without positions; experts beside a shared MLP."""

    defaults: ClassVar = Granite.defaults | {
        "shared_intermediate_size": 1024,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
    ignored = ("sliding_window",)

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """Without the number of experts where it is 0."""
        stated = config.get("num_local_experts")
        if stated != 0:
            return config
        return Fields({**config.values, "num_local_experts": None}, config.where)

    @classmethod
    def layers_with_rope(cls, fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
        has_rope = fields.text("position_embedding_type", default=None) == "rope"
        return [has_rope] * len(layer_types)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        recurs = _recurs(config.fields, config.num_layers)
        return with_states(super().configure(config), _dims(config.fields).spec, recurs)

    def mixer(self, index: int) -> LayerMixer:
        """Mamba-2 or attention."""
        state = self.config.states[index]
        if state is None:
            return super().mixer(index)
        fields = self.config.fields
        bias = fields.boolean("mamba_proj_bias")
        return plain_mamba_mixer(self, f"model.layers.{index}.mamba", _dims(fields), bias=bias)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}"
        inner = config.fields.integer("shared_intermediate_size", high=2**22)
        if f"{path}.mlp.gate_proj.weight" in self.weights:  # as MLX checkpoints have it
            shared = self.dense_mlp(f"{path}.mlp", inner)
        else:
            shared = self.packed_mlp(f"{path}.shared_mlp", inner)
        if not config.num_experts:
            return shared
        return _experts(self, path, shared)


class GraniteSWA(Granite):
    """Granite with learned sinks in all layers, and windows in three of four."""

    defaults: ClassVar = Granite.defaults | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    }
    ignored = ()
    sinks = learned_sinks

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """Every fourth layer, from the first, sees everything."""
        return [SLIDING if i % 4 else FULL for i in range(num_layers)]

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """By the base that `layer_rope_theta` states for each layer; 0: it has no positions."""
        return with_layer_thetas(fields, super().rope_specs(fields, layer_types, head_dim))


class GraniteMoESWA(GraniteSWA):
    """The same with experts in place of the MLP, with or without a shared one beside them."""

    defaults: ClassVar = Granite.defaults | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
        "sliding_window": 128,
    }

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}"
        inner = self.config.fields.integer("shared_intermediate_size", low=0, high=2**22)
        shared = self.packed_mlp(f"{path}.shared_mlp", inner) if inner else None
        return _experts(self, path, shared)


def _experts(family: Granite, path: str, shared: FeedForward | None) -> FeedForward:
    """The experts of the layer at `path`, by the softmax of the best."""
    choose = ExpertChoice(Routing(family.config.experts_per_token, normalised=True))
    return family.experts(f"{path}.block_sparse_moe", choose, router="router.layer", shared=shared)


def _recurs(fields: Fields, num_layers: int) -> list[bool]:
    """For each layer, whether it is recurrent. All are, unless the config lists layer types."""
    keys, known = ("layer_types", "layers_block_type"), (*_RECURRENT, *_ATTENTION)
    stated = fields.by_layer(*keys, count=num_layers, known=known)
    if stated is None:
        return [True] * num_layers
    return [kind in _RECURRENT for kind in stated]


def _dims(fields: Fields) -> MambaDims:
    width = fields.integer("mamba_expand", high=2**10) * fields.integer("hidden_size", high=2**20)
    return MambaDims.of(fields, width=width)
