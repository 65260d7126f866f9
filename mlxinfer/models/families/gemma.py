"""Gemma 2, and Gemma 3 alone or as the language model of a multimodal checkpoint."""

from dataclasses import replace
from typing import ClassVar

from ..config import ModelConfig
from ..family import Family, HeadNorms, root_of_width
from ..jsonfields import Fields

SPANS = "sees_spans"  # our own key: features of a picture see each other


def language_fields(config: Fields, model_type: str) -> Fields:
    text = config.fields("text_config")
    fields = config if text is None or config.get("model_type") != model_type else text
    return Fields({**fields.values, "model_type": f"{model_type}_text"}, fields.where)


def sees_pictures(config: Fields) -> bool:
    return config.get("vision_config") is not None


class Gemma2(Family):
    """Sandwich norms, norm weights stored less one, scaled embeddings, and a soft cap on scores."""

    defaults: ClassVar = {
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    fits_float16 = False
    computed: ClassVar[tuple[str, ...]] = ("attn_logit_softcapping",)
    norm_offset = 1.0
    embed_scale = root_of_width
    block_norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


class Gemma3(Gemma2):
    """As Gemma 2, with QK-norm in place of the soft cap."""

    defaults: ClassVar = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    }
    computed = ("use_bidirectional_attention",)  # EmbeddingGemma
    head_norms = HeadNorms()
    ignored = ("attention_bias",)

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        fields = language_fields(config, "gemma3")
        return Fields({**fields.values, SPANS: sees_pictures(config)}, fields.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        if not config.bidirectional:
            spans = config.fields.boolean(SPANS)
            return replace(config, sees_spans=(spans,) * config.num_layers)
        halves = tuple(None if window is None else window // 2 + 1 for window in config.windows)
        return replace(config, windows=halves)
