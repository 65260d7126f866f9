"""ModernBERT: rotary positions, gated blocks, norms before each block, windows in most layers.

Source: arXiv 2412.13663; transformers' modeling_modernbert.py.
"""

from typing import ClassVar

from ...layers.linear import Projection
from ...layers.mlp import MLP
from ...layers.norm import Norm
from ...layers.step import Layer
from ..config import FULL, SLIDING
from ..decoder import ResidualLayer
from ..encoder import Encoder, SummedEmbeddings, identity
from ..jsonfields import Fields


class ModernBert(Encoder):
    """Every third layer sees all, the others `local_attention` tokens around each."""

    defaults: ClassVar = {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    }
    rotary = True
    names: ClassVar = {
        "embeddings.tok_embeddings": "embed_tokens",
        "embeddings.norm": "embeddings_norm",
        ".attn.Wqkv": ".self_attn.qkv_proj",
        ".attn.Wo": ".self_attn.o_proj",
        ".attn_norm": ".input_layernorm",
        ".mlp.Wi": ".mlp.gate_up_proj",
        ".mlp.Wo": ".mlp.down_proj",
        ".mlp_norm": ".post_attention_layernorm",
        "final_norm": "norm",
    }
    prefixes = ("model.",)
    left_out = ("head.", "decoder.", "classifier.")

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The usual keys; `local_attention` counts both sides."""
        fields = Fields({**cls.defaults, **config.values}, config.where)
        half = fields.integer("local_attention", low=2) // 2
        stated = {
            "sliding_window": half + 1,  # tokens to either side, and the token itself
            "layer_norm_eps": fields.get("norm_eps"),
            "rope_theta": fields.get("global_rope_theta"),
            "rope_local_base_freq": fields.get("local_rope_theta"),
        }
        return Fields({**fields.values, **stated}, config.where)

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """The first of every few layers sees everything."""
        period = fields.integer("global_attn_every_n_layers")
        return [SLIDING if i % period else FULL for i in range(num_layers)]

    def entry(self) -> SummedEmbeddings:
        return SummedEmbeddings(self.norm("model.embeddings_norm"))

    def qkv(self, index: int) -> Projection:
        config, hidden = self.config, self.config.hidden_size
        path = f"model.layers.{index}.self_attn.qkv_proj"
        return self.weights.linear(path, 3 * hidden, hidden, bias=config.qkv_bias)

    def layer(self, index: int) -> Layer:
        """Norms before both blocks; the embeddings' own norm stands for the first."""
        path = f"model.layers.{index}"
        first: Norm = identity if index == 0 else self.norm(f"{path}.input_layernorm")
        norm = self.norm(f"{path}.post_attention_layernorm")
        return ResidualLayer(self.mixer(index), self.mlp(index), before=(first, norm))

    def mlp(self, index: int) -> MLP:
        return self.packed_mlp(f"model.layers.{index}.mlp", self.config.intermediate_size)

    def last_norm(self) -> Norm:
        return self.norm("model.norm")
