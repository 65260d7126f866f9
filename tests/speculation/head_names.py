"""Random heads that predict further ahead, by their published names. No mlx, no torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from models.random_weights import LESS_ONE, random_tensor

from tests.tables import words

Tensors = dict[str, np.ndarray]
MIXTURE = "mtp.hyper_connection_mixer."
LENGTH = 21
MTP_CASES = words("""
    qwen3_5_text-v4 qwen3_next-v4 glm4_moe-v4 deepseek_v3-v4 xing4_0-v4 glm4_moe_lite-v4
    glm_moe_dsa-shared bailing_hybrid-v4 hy_v3-v4 exaone_moe-v4 ernie4_5_moe-v4 exaone4-v4 mellum-v4
    sarvam_mla-v4 sarvam_moe-v4 step3p5-v4 mimo_v2_flash-v4 qwen4_exp_text-v4 nemotron_h-v5
""")
QWEN_CASES = ("qwen3_5_text-v4", "qwen3_next-v4")  # transformers has no reference for them
# Its `MtpModel` takes no layer that returns its choice of tokens.
NO_REFERENCE = (*QWEN_CASES, "glm_moe_dsa-shared", "xing4_0-v4")
REFERENCE_CASES = tuple(c for c in MTP_CASES if c not in NO_REFERENCE)


def head_inputs(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (LENGTH,) and random hidden states (LENGTH, hidden_size), or streams of them."""
    rng = np.random.default_rng(0)
    width = num_streams(config) * config["hidden_size"]
    hidden = rng.standard_normal((LENGTH, width)).astype(np.float32)
    return rng.integers(3, config["vocab_size"], LENGTH), hidden


def num_streams(config: dict[str, Any]) -> int:
    """Residual streams of a token."""
    count: int = (
        config.get("hc_count", 4) if config.get("model_type", "").startswith("qwen4") else 1
    )
    return count


@dataclass(frozen=True)
class HeadNames:
    """Published names of a head: what its layer's tensors begin with, and its parts' paths.

    Args:
        proj: of both inputs; of the embedding where streams have a projection of their own.
        norm: before the logits; None: it is the model's, or a mixture of streams.
        mixture: of the head's streams.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    proj: str
    norm: str | None
    tables: tuple[str, ...] = ()  # copies of the model's tables
    stream_proj: str | None = None
    mixture: str | None = None

    @property
    def norms(self) -> list[str]:
        """Of the head itself."""
        return [n for n in (self.embedding_norm, self.hidden_norm, self.norm) if n is not None]


def head_names(config: dict[str, Any]) -> HeadNames:
    """As the family's checkpoints have them."""
    kind, layer = config["model_type"], f"model.layers.{config['num_hidden_layers']}."
    if kind.startswith("qwen4"):
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        projs = {"proj": "mtp.fc_embedding", "stream_proj": "mtp.fc_hidden"}
        return HeadNames("mtp.layers.0.", *norms, **projs, norm=None, mixture=MIXTURE)
    if kind == "nemotron_h":
        parts = [f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")]
        return HeadNames("mtp.layers.0.", *parts, "mtp.layers.1.final_layernorm")
    if kind == "mimo_v2_flash":
        front = "model.mtp.layers.0."
        parts = [f"{front}{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")]
        return HeadNames(front, *parts)
    if kind.startswith("qwen") or kind in ("exaone4", "exaone_moe", "mellum"):
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return HeadNames("mtp.layers.0.", *norms, "mtp.fc", "mtp.norm")
    if kind == "ernie4_5_moe":
        parts = [f"model.mtp_{name}.0" for name in ("emb_norm", "hidden_norm", "linear_proj")]
        return HeadNames("model.mtp_block.0.", *parts, None)
    parts = [f"{layer}{name}" for name in ("enorm", "hnorm", "eh_proj")]
    if kind in ("hy_v3", "bailing_hybrid"):
        return HeadNames(layer, *parts, f"{layer}final_layernorm")
    if kind == "step3p5":
        shared = f"{layer}transformer.shared_head."
        return HeadNames(layer, *parts, f"{shared}norm", (f"{shared}output",))
    tables = f"{layer}embed_tokens", f"{layer}shared_head.head"
    return HeadNames(layer, *parts, f"{layer}shared_head.norm", tables)


def mtp_tensors(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """A random head like one of the model's layers with attention, named as published."""
    hidden, names = config["hidden_size"], head_names(config)
    less_one = config["model_type"].startswith(LESS_ONE)
    fronts = {f"model.layers.{head_like(config, tensors)}.": names.layer}
    if config["model_type"] == "mimo_v2_flash":  # its experts are those of another layer: none
        fronts = {f"{next(iter(fronts))}self_attn.": f"{names.layer}self_attn."}
        fronts["model.layers.0.mlp."] = f"{names.layer}mlp."
        fronts["model.layers.0.input_layernorm."] = f"{names.layer}input_layernorm."
        fronts["model.layers.0.post_attention_layernorm."] = f"{names.layer}pre_mlp_layernorm."
    if config["model_type"] == "nemotron_h":  # its attention, and its experts
        fronts = {"backbone.layers.3.": names.layer, "backbone.layers.4.": "mtp.layers.1."}
    if names.mixture is not None:
        fronts["model.hyper_connection_mixer."] = names.mixture
    shapes = {
        ours + name.removeprefix(front): array.shape
        for name, array in tensors.items()
        for front, ours in fronts.items()
        if name.startswith(front) and "_hc." not in name  # Xing's head has one stream
    }
    shapes[f"{names.proj}.weight"] = (hidden, (1 if names.stream_proj else 2) * hidden)
    shapes |= {f"{name}.weight": (config["vocab_size"], hidden) for name in names.tables}
    shapes |= {f"{name}.weight": (hidden,) for name in names.norms}
    if names.stream_proj is not None:
        shapes[f"{names.stream_proj}.weight"] = (hidden, hidden)
        shapes[f"{names.hidden_norm}.weight"] = (num_streams(config) * hidden,)
    return {name: random_tensor(name, s, 7, less_one=less_one) for name, s in shapes.items()}


def head_like(config: dict[str, Any], tensors: Tensors) -> int:
    """The layer that the head is like: a dense one, or the last with attention, or an indexer.

    Of MiMo its attention, which has a window.
    """
    if config["model_type"] in ("exaone_moe", "ernie4_5_moe"):
        return 0
    if config["model_type"] == "mimo_v2_flash":
        return 4
    ends = (".o_proj.weight", ".attention.kv_b_proj.weight", ".query_key_value.weight")
    if config["model_type"] == "glm_moe_dsa":
        ends = (".indexer.wk.weight",)
    return max(int(name.split(".")[2]) for name in tensors if name.endswith(ends))


BLOCK = 8
ASSISTANT: dict[str, Any] = {  # of Muse Glimmer, for a model of the width of the tiny ones
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"],
    "block_size": BLOCK,
    "mask_token_id": 2,
    "target_layer_ids": [0, 2],
}
ASSISTANT_MODEL = "qwen3-v5"


def assistant_tensors() -> Tensors:
    """Random tensors of `ASSISTANT`, named as published."""
    hidden, heads, kv = 64, 4 * 16, 2 * 16
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.fc.weight": (hidden, 2 * hidden),
        "encoder.output_norm_enc.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for front in ("layers.0.", "layers.1."):
        shapes |= {f"{front}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        shapes |= {f"{front}self_attn.{n}_norm.weight": (16,) for n in "qk"}
        rows = {"q": heads, "k": kv, "v": kv}
        shapes |= {f"{front}self_attn.{n}_proj.weight": (r, hidden) for n, r in rows.items()}
        shapes[f"{front}self_attn.o_proj.weight"] = (hidden, heads)
        shapes |= {f"{front}mlp.{n}_proj.weight": (48, hidden) for n in ("gate", "up")}
        shapes[f"{front}mlp.down_proj.weight"] = (hidden, 48)
    return {name: random_tensor(name, s, 9, less_one=False) for name, s in shapes.items()}
