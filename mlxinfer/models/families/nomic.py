"""Nomic BERT (nomic-embed-text v1 and v1.5): rotary positions and gated blocks in a BERT.

Source: arXiv 2402.01613; transformers' modeling_nomic_bert.py, and the names and keys of the
checkpoints on the hub, which are those of flash-attn's GPT-2.
"""

from typing import ClassVar

from ...layers.linear import Projection
from ..encoder import Encoder
from ..jsonfields import Fields

_KEYS = {  # the hub's, and ours
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
_FIXED = {  # keys -> the value that is built here; others are other networks
    "activation_function": ("swiglu", "silu"),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "moe_every_n_layers": (0, -1),
    "num_experts": (0,),
}


class NomicBert(Encoder):
    """Nomic BERT, versions 1 and 1.5."""

    defaults: ClassVar = {
        "vocab_size": 30_528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "rope_theta": 1000.0,
    }
    prefixes = ("nomic_bert.", "bert.")
    rotary = True
    keys = _KEYS
    names: ClassVar = {
        "embeddings.word_embeddings": "embed_tokens",
        "embeddings.token_type_embeddings": "token_type_embeddings",
        "embeddings.LayerNorm": "embeddings_norm",
        "emb_ln": "embeddings_norm",
        "encoder.layers.": "layers.",
        ".attn.Wqkv": ".self_attn.qkv_proj",
        ".attn.out_proj": ".self_attn.o_proj",
        ".mlp.fc11": ".mlp.up_proj",
        ".mlp.fc12": ".mlp.gate_proj",
        ".mlp.fc2": ".mlp.down_proj",
        ".norm1": ".post_attention_layernorm",
        ".norm2": ".post_mlp_layernorm",
    }

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """Refuses other networks of the same name."""
        config.require(_FIXED)
        return super().language_model(config)

    def qkv(self, index: int) -> Projection:
        path, hidden = f"model.layers.{index}.self_attn.qkv_proj", self.config.hidden_size
        if f"{path}.weight" in self.weights:
            return self.weights.linear(path, 3 * hidden, hidden)
        return super().qkv(index)
