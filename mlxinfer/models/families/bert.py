"""BERT, RoBERTa and XLM-RoBERTa, DistilBERT: MiniLM, BGE, E5, GTE and most embedding models.

Sources: arXiv 1810.04805, 1907.11692, 1911.02116, 1910.01108; transformers' modeling_bert.py,
modeling_xlm_roberta.py and modeling_distilbert.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from ...layers.mlp import FeedForward
from ..config import ModelConfig
from ..encoder import Encoder
from ..jsonfields import Fields

_EMBEDDINGS = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "position_embeddings",
    "embeddings.token_type_embeddings": "token_type_embeddings",
    "embeddings.LayerNorm": "embeddings_norm",
}


class Bert(Encoder):
    """Tables of positions and of token types, norms behind each block."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 30_522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "attention_bias": True,
    }
    prefixes = ("bert.", "roberta.", "xlm_roberta.")
    names: ClassVar = {
        **_EMBEDDINGS,
        "encoder.layer.": "layers.",
        ".attention.self.query": ".self_attn.q_proj",
        ".attention.self.key": ".self_attn.k_proj",
        ".attention.self.value": ".self_attn.v_proj",
        ".attention.output.dense": ".self_attn.o_proj",
        ".attention.output.LayerNorm": ".post_attention_layernorm",
        ".intermediate.dense": ".mlp.up_proj",
        ".output.dense": ".mlp.down_proj",
        ".output.LayerNorm": ".post_mlp_layernorm",
        "embeddings.norm.": "embeddings_norm.",  # as mlx-embeddings has it
    }

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Positions have a table of their own; distances between tokens are not encoded."""
        config.fields.require({"position_embedding_type": ["absolute"]})
        return super().configure(config)

    def mlp(self, index: int) -> FeedForward:
        return self.ungated_mlp(f"model.layers.{index}.mlp")


class Roberta(Bert):
    """BERT with positions that begin behind the padding's, at 2 in most checkpoints."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Bert.defaults,
        "max_position_embeddings": 514,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        fields = Fields({**cls.defaults, **config.values}, config.where)
        rows = fields.integer("max_position_embeddings")
        positions = rows - _first(fields)
        return Fields({**fields.values, "max_position_embeddings": positions}, fields.where)

    @property
    def first_position(self) -> int:
        return _first(self.config.fields)


class DistilBert(Encoder):
    """BERT without token types, under names of its own."""

    defaults: ClassVar[Mapping[str, Any]] = {**Bert.defaults, "type_vocab_size": 0}
    prefixes = ("distilbert.",)
    keys: ClassVar = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    }
    left_out = (
        "pre_classifier.",
        "classifier.",
        "vocab_transform.",
        "vocab_layer_norm.",
        "vocab_projector.",
    )
    names: ClassVar = {
        **_EMBEDDINGS,
        "transformer.layer.": "layers.",
        ".attention.q_lin": ".self_attn.q_proj",
        ".attention.k_lin": ".self_attn.k_proj",
        ".attention.v_lin": ".self_attn.v_proj",
        ".attention.out_lin": ".self_attn.o_proj",
        ".sa_layer_norm": ".post_attention_layernorm",
        ".ffn.lin1": ".mlp.up_proj",
        ".ffn.lin2": ".mlp.down_proj",
        ".output_layer_norm": ".post_mlp_layernorm",
    }

    def mlp(self, index: int) -> FeedForward:
        return self.ungated_mlp(f"model.layers.{index}.mlp")


def _first(fields: Fields) -> int:
    return 1 + int(fields.integer("pad_token_id", low=0, high=2**20, default=1))
