"""LFM2, LFM2.5 and LFM3: short convolutions, and attention now and then; dense or with experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...cache_specs import StateSpec
from ...layers.attention import LayerMixer
from ...layers.linear import Projection
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...layers.recurrent import ShortConv
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig
from ..family import Family, HeadNorms
from ..jsonfields import Fields
from .mixtral import PROJECTIONS
from .recurrent import causal_conv, with_states


class Lfm2(Family):
    """The dense models; attention has QK-norm."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
    }
    head_norms = HeadNorms(("q_layernorm", "k_layernorm"))
    output_proj = "out_proj"
    final_norm = "model.embedding_norm"
    ignored: ClassVar[tuple[str, ...]] = ("attention_bias", "sliding_window")
    block_norms = ("operator_norm", None, "ffn_norm", None)
    keys: ClassVar = {
        "norm_eps": "rms_norm_eps",
        "block_ff_dim": "intermediate_size",
        "tie_embedding": "tie_word_embeddings",
    }

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields = config.fields
        length = fields.integer("conv_L_cache", low=2, high=64)
        state = StateSpec((((length - 1, config.hidden_size), "float32"),))
        config = replace(
            config,
            rms_norm_eps=fields.number("norm_eps", low=0.0, high=1.0),
            intermediate_size=_inner(fields, config.intermediate_size),
        )
        return with_states(config, state, cls.convolves(fields, config.num_layers))

    @classmethod
    def convolves(cls, fields: Fields, num_layers: int) -> list[bool]:
        stated = fields.by_layer("layer_types", count=num_layers, known=("conv", FULL))
        if stated is not None:
            return [kind == "conv" for kind in stated]
        attending = fields.items("full_attn_idxs")
        return [attending is not None and i not in attending for i in range(num_layers)]

    def mlp(self, index: int) -> FeedForward:
        """w1 is the gate, w3 goes up, w2 down."""
        path = f"model.layers.{index}.feed_forward"
        return self.dense_mlp(path, self.config.intermediate_size, ("w1", "w3", "w2"))

    def mixer(self, index: int) -> LayerMixer:
        state = self.config.states[index]
        if state is None:
            return super().mixer(index)
        config, weights, path = self.config, self.weights, f"model.layers.{index}.conv"
        hidden, bias = config.hidden_size, config.fields.boolean("conv_bias")
        return ShortConv(
            in_proj=weights.linear(f"{path}.in_proj", 3 * hidden, hidden, bias=bias),
            out_proj=weights.linear(f"{path}.out_proj", hidden, hidden, bias=bias),
            conv=causal_conv(self, f"{path}.conv", state, bias=bias),
            spec=state,
        )


class Lfm3(Lfm2):
    """LFM3: windows, a gate for each head, and norms behind the blocks too."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "norm_eps": 1e-5,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "max_position_embeddings": 128_000,
        "sliding_window": 256,
        "conv_bias": False,
        "conv_L_cache": 7,
        "block_auto_adjust_ff_dim": False,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "tie_word_embeddings": True,
    }
    output_proj = "o_proj"
    head_norms = HeadNorms()
    ignored = ()

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """As stated; a convolution counts as one that sees everything."""
        kinds = _lfm3_kinds(fields, num_layers)
        return [SLIDING if kind == SLIDING else FULL for kind in kinds]

    @classmethod
    def convolves(cls, fields: Fields, num_layers: int) -> list[bool]:
        return [kind == "conv" for kind in _lfm3_kinds(fields, num_layers)]

    def norm_names(self, index: int) -> Sequence[str | None]:
        if not self.config.fields.boolean("use_sandwich_norm"):
            return self.block_norms
        return "operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"

    def attention_inputs(self, index: int) -> tuple[Projection, Projection | None]:
        if not self.config.fields.boolean("use_attention_gate"):
            return self.qkv(index), None
        return self.qkv(index), self.gates(index, "gate_proj", by_head=True)


class Lfm2MoE(Lfm2):
    """LFM2 with experts in all but the first layers."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
    }
    names = PROJECTIONS

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config = super().configure(config)
        dense = config.fields.integer("num_dense_layers", low=0)
        sparse = tuple(i >= dense for i in range(config.num_layers))
        return replace(config, sparse_layers=sparse)

    def mlp(self, index: int) -> FeedForward:
        """An MLP in the first layers, then experts: sigmoid scores, chosen with a bias."""
        config, fields = self.config, self.config.fields
        path = f"model.layers.{index}.feed_forward"
        if not config.sparse_layers[index]:
            return self.dense_mlp(path, config.intermediate_size)
        bias = mx.zeros(config.num_experts)
        if fields.boolean("use_expert_bias"):
            bias = self.weights.raw(f"{path}.expert_bias", (config.num_experts,))
        routing = Routing(
            config.experts_per_token,
            sigmoid=True,
            normalised=config.norm_topk_prob,
            biased=True,
            eps=1e-6,
            factor=fields.number("routed_scaling_factor"),
        )
        return self.experts(path, ExpertChoice(routing, bias.astype(mx.float32)))


def _lfm3_kinds(fields: Fields, num_layers: int) -> list[str]:
    """For each layer "conv", FULL or SLIDING."""
    known = ("conv", FULL, SLIDING)
    return fields.by_layer("layer_types", count=num_layers, known=known) or [
        FULL if i % 4 == 2 else SLIDING if i and not i % 4 else "conv" for i in range(num_layers)
    ]


def _inner(fields: Fields, stated: int) -> int:
    """The width of the feed-forward blocks: two thirds of the stated width, rounded up."""
    if not fields.boolean("block_auto_adjust_ff_dim"):
        return stated
    multiple = fields.integer("block_multiple_of", high=2**16)
    inner = int(fields.number("block_ffn_dim_multiplier", above=0.0) * int(2 * stated / 3))
    return multiple * -(-inner // multiple)
