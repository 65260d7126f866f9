"""Llama, and families that differ from it in a few rules: their biases, norms, ropes or names.

Llama 2 and 3, Mistral, Ministral 8B, AFM, CWM, Seed-OSS, Hunyuan, ERNIE 4.5, Phi 3 and SmolLM3.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ...errors import UnsupportedModelError
from ...layers.linear import Projection
from ...layers.mlp import MLP, FeedForward, relu_squared
from ...layers.moe import ExpertChoice
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING, ModelConfig, read_layer_types
from ..family import Family, HeadNorms, pairs_apart
from ..jsonfields import Fields

PARTIAL = "partial_rotary_factor"


def whole_heads(config: Fields) -> Fields:
    """A config without `partial_rotary_factor`, in either spelling: rope has whole heads."""
    values = {key: value for key, value in config.values.items() if key != PARTIAL}
    for spelling in ("rope_parameters", "rope_scaling"):
        if (rope := config.fields(spelling)) is not None:
            values[spelling] = {key: value for key, value in rope.values.items() if key != PARTIAL}
    return Fields(values, config.where)


class Llama(Family):
    """Llama 2 and 3. A window in the config is not used, nor is a part of heads that rotates.

    transformers and mlx-lm rotate whole heads of this architecture, whatever the config says.
    """

    ignored = ("sliding_window",)

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        return whole_heads(config)


class IQuestCoder(Family):
    """IQuest-Coder 40B."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    }
    ignored = ("sliding_window",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config.fields.require({"clip_qkv": (), "use_sliding_window": (False,)})
        return config


class Mistral(Family):
    """Mistral, and Ministral 8B of 2024: windows where the config states them, never a bias."""

    defaults: ClassVar = {"sliding_window": 4096, "num_key_value_heads": 8}
    ignored = ("attention_bias",)


class Cwm(Mistral):
    """CWM 32B: every fourth layer sees everything, counted from the first one."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
        "sliding_window": 8192,
        "eos_token_id": [128_001, 128_008, 128_009],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        return [SLIDING if i % 4 else FULL for i in range(num_layers)]


class Arcee(Family):
    """AFM 4.5B: blocks without gates, of squared ReLU."""

    defaults: ClassVar = {
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
    ignored = ("sliding_window",)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        if config.activation != "relu2":
            raise UnsupportedModelError(
                f"hidden_act in {config.fields.where} is {config.activation!r}; "
                f"{config.model_type!r} models with 'relu2' run."
            )
        sizes = (config.hidden_size, config.intermediate_size)
        up = self.weights.linear(f"{path}.up_proj", *sizes[::-1], bias=config.mlp_bias)
        down = self.weights.linear(f"{path}.down_proj", *sizes, bias=config.mlp_bias)
        return MLP(up, down, relu_squared)


class SeedOss(Family):
    """Seed-OSS: biases on Q, K and V; the output projection's is stated apart."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "max_position_embeddings": 524_288,
    }
    biases = ("attention_bias", "attention_out_bias")
    ignored = ("sliding_window",)


class HunYuanDense(Family):
    """Hunyuan 0.5B to 7B: a norm of Q and K behind the rope.

    `alpha` in rope_scaling raises the base of the rope.
    """

    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    head_norms = HeadNorms(("query_layernorm", "key_layernorm"), behind_rope=True)
    ignored = ("sliding_window",)


class HunYuanMoE(HunYuanDense):
    """Hunyuan-A13B: a softmax over experts in every layer, and an MLP beside them."""

    defaults: ClassVar = {**HunYuanDense.defaults, "num_experts": 1, "moe_topk": 1}
    dense_matrices = (".mlp.gate",)
    names: ClassVar = {".mlp.gate.wg.": ".mlp.gate."}

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        values = dict(config.values)
        for key in ("moe_topk", "moe_intermediate_size", "num_shared_expert"):
            stated = values.get(key)
            if isinstance(stated, list):
                if not stated or any(one != stated[0] for one in stated):
                    raise UnsupportedModelError(
                        f"{key} in {config.where} differs between layers; models with the same "
                        "number in all layers run."
                    )
                values[key] = stated[0]
        values["num_experts_per_tok"] = values.get("moe_topk", 1)
        return Fields(values, config.where)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        count = config.fields.integer("num_shared_expert", high=2**10, default=1)
        shared = self.dense_mlp(f"{path}.shared_mlp", config.intermediate_size * count)
        choose = ExpertChoice(Routing(config.experts_per_token, normalised=True))
        return self.experts(path, choose, shared=shared)


class Ernie4_5(Family):
    """ERNIE 4.5, dense: rotary pairs side by side, and one field for all biases."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "use_bias": False,
        "tie_word_embeddings": True,
    }
    biases = ("use_bias", "use_bias")
    ignored = ("sliding_window",)
    head_order = pairs_apart

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, mlp_bias=config.fields.boolean("use_bias"))


class Phi3(Family):
    """Phi 3, 3.5 and 4 mini: packed projections, and long RoPE by each request's length.

    Q, K and V are one tensor in the checkpoint, and so are gate and up.

    The reference recomputes its frequencies in the middle of an answer that grows past the original
    context, while the keys before stay as they were. Here a sequence keeps the frequencies that its
    greatest possible length asks for; see `Model.rope_variant`.
    """

    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    }
    ignored = ("attention_bias",)

    def qkv(self, index: int) -> Projection:
        config, path = self.config, f"model.layers.{index}.self_attn"
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        widths = [count * config.head_dim for count in heads]
        bias = config.qkv_bias
        return self.weights.linear(
            f"{path}.qkv_proj", sum(widths), config.hidden_size, bias=bias, parts=widths
        )

    def mlp(self, index: int) -> FeedForward:
        return self.packed_mlp(f"model.layers.{index}.mlp", self.config.intermediate_size)


class SmolLM3(Family):
    """SmolLM3: every fourth layer has no positions (arXiv 2501.18795).

    Windows count only where `use_sliding_window` says so.
    """

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2_000_000.0,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    }

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        stated = fields.boolean("use_sliding_window", default=False)
        return super().layer_types(fields, num_layers) if stated else [FULL] * num_layers

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """Layers without positions have the window."""
        kinds = read_layer_types(fields, num_layers)
        with_rope = cls.layers_with_rope(fields, kinds)
        return [FULL if has_rope else kind for kind, has_rope in zip(kinds, with_rope, strict=True)]

    @classmethod
    def layers_with_rope(cls, fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
        """False where `no_rope_layers` has a 0."""
        count = len(layer_types)
        stated = fields.by_layer("no_rope_layers", count=count, known=(0, 1))
        if stated is None:
            interval = fields.integer("no_rope_layer_interval")
            stated = [(i + 1) % interval for i in range(count)]
        return [bool(value) for value in stated]
