"""Llama 4: attention in chunks, every fourth layer without positions, a router that scales inputs.

Layers with positions see the part of their own chunk of the context that came before; the others
see everything, their queries growing with the logarithm of the position. Q and K of the former have
a norm without weights behind the rope, where the config says so. Every expert gets the token times
the sigmoid of its own logit. Source: transformers' modeling_llama4.py.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...layers.attention import AttentionArgs
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...layers.norm import RMSNorm
from ...layers.rope import QueryScale
from ...metal_kernels.routing import Routing
from ..config import FULL, ModelConfig
from ..experts import PACKED, TransposedExperts
from ..family import Family, pairs_apart
from ..jsonfields import Fields
from .llama import SmolLM3

_CHUNKED = "chunked_attention"
_STACK = re.compile(r"\.feed_forward\.experts\.(?!\d)")  # of all experts, not one of them


class Llama4(Family):
    """Scout and Maverick, the language model; and small models without experts."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }
    head_order = pairs_apart
    packed_experts = TransposedExperts()
    stacks = ()  # MLX's are called otherwise
    ignored = ("sliding_window",)

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """Without zeros, which say that there are no experts."""
        sizes = ("num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step")
        if all(config.get(name) != 0 for name in sizes):
            return config
        rest = {key: value for key, value in config.values.items() if key not in sizes}
        return Fields({**rest, "moe_layers": []}, config.where)

    @classmethod
    def layers_with_rope(cls, fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
        return SmolLM3.layers_with_rope(fields, layer_types)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields, count = config.fields, config.num_layers
        chunk = fields.integer("attention_chunk_size", default=None)
        kinds = fields.by_layer("layer_types", count=count, known=(FULL, _CHUNKED))
        if kinds is None:
            kinds = [_CHUNKED if rope else FULL for rope in config.ropes]
        step = fields.integer("interleave_moe_layer_step", low=1)
        sparse = fields.items("moe_layers")
        if sparse is None:
            sparse = [*range(step - 1, count, step)]
        return replace(
            config,
            windows=tuple(chunk if kind == _CHUNKED else None for kind in kinds),
            chunked=True,
            sparse_layers=tuple(i in sparse for i in range(count)),
            moe_intermediate_size=config.intermediate_size,
        )

    @classmethod
    def rename(cls, name: str) -> str | None:
        if name.endswith(PACKED):
            return f"{name}.weight"
        if _STACK.search(name):  # as MLX checkpoints have them
            return name.replace(".experts.", ".switch_mlp.")
        return super().rename(name)

    def attention_args(self, index: int) -> AttentionArgs:
        """With a norm without weights behind the rope, else queries that grow with the position."""
        args, config, fields = super().attention_args(index), self.config, self.config.fields
        if args.rope is not None and fields.boolean("use_qk_norm"):
            ones = mx.ones((config.head_dim,), self.weights.dtype)
            args.qk_norm, args.norm_last = RMSNorm(ones, config.rms_norm_eps), True
        elif args.rope is None and fields.get("attn_temperature_tuning"):
            slope = fields.number("attn_scale", low=0.0, high=1e3)
            args.query_scale = QueryScale(slope, fields.integer("floor_scale", low=1), offset=1)
        return args

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.feed_forward"
        if not config.sparse_layers[index]:
            return self.dense_mlp(path, config.fields.integer("intermediate_size_mlp"))
        return self.experts(
            path,
            ExpertChoice(Routing(config.experts_per_token, sigmoid=True)),
            router="router",
            shared=self.dense_mlp(f"{path}.shared_expert", config.intermediate_size),
            weighs_inputs=True,
        )
