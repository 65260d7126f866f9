"""Tiny checkpoints with heads: random ones, and ones with proposals that all hold.

A head that is always right is possible where a token follows from the one before it alone: in a
model with layers that add nothing. There the embedding's half of the head's projection is the
identity and the other half is zero, so that the head computes what the model will.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from models import tiny
from models.random_weights import LESS_ONE, random_tensor, tiny_tensors
from models.tiny import quantized, tiny_config
from speculation.head_names import Tensors, head_names, mtp_tensors

SILENT = (
    "o_proj.weight", "out_proj.weight", "down_proj.weight", "attention.dense.weight",
    "ple.value_proj.weight", "out_proj.bias",
)  # fmt: skip


def mtp_checkpoint(
    folder: Path, case: str, *, right: bool = False, how: dict[str, Any] | None = None
) -> Path:
    """A checkpoint with its head; `right`: it proposes what the model says.

    Args:
        folder: that is written.
        case: of the model.
        right: see above.
        how: of the quantisation; None: float32.
    """
    config = {**tiny_config(case), "num_nextn_predict_layers": 1}
    tensors = tiny_tensors(config)
    tensors |= mtp_tensors(config, tensors)
    if right:
        _make_right(config, tensors)
    return write(folder, config, tensors, how)


def _make_right(config: dict[str, Any], tensors: Tensors) -> None:
    """Layers that add nothing, and a head that looks at the token alone."""
    hidden, names = config["hidden_size"], head_names(config)
    one = 0.0 if config["model_type"].startswith(LESS_ONE) else 1.0
    for name in tensors:
        if name.endswith(SILENT):
            tensors[name] = np.zeros_like(tensors[name])
    identity, other = np.eye(hidden, dtype=np.float32), np.zeros((hidden, hidden), np.float32)
    joined = names.stream_proj is None
    tensors[f"{names.proj}.weight"] = (
        np.concatenate([identity, other], axis=1) if joined else identity
    )
    if names.stream_proj is not None:
        tensors[f"{names.stream_proj}.weight"] = other
    if names.mixture is not None:
        of_model = "model.hyper_connection_mixer."
        mixture = {n: a for n, a in tensors.items() if n.startswith(of_model)}
        tensors |= {n.replace(of_model, names.mixture): a for n, a in mixture.items()}
    tensors[f"{names.embedding_norm}.weight"] = np.full(hidden, one, np.float32)
    if names.norm is not None:
        norms = [n for n in ("model.norm.weight", "backbone.norm_f.weight") if n in tensors]
        tensors[f"{names.norm}.weight"] = tensors[norms[0]]


def write(
    folder: Path, config: dict[str, Any], tensors: Tensors, how: dict[str, Any] | None
) -> Path:
    """config.json and model.safetensors."""
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    if how is not None:
        arrays, config = quantized(arrays, how), {**config, "quantization": how}
    return tiny.write(folder, config, arrays)


def eagle_checkpoint(
    folder: Path,
    model: dict[str, Any],
    *,
    drafted: int,
    right: Tensors | None = None,
    seed: int = 3,
    **changes: object,
) -> Path:
    """An EAGLE-3 head for a model with this config.

    Args:
        folder: that is written.
        model: the model's config.
        drafted: tokens of the head's vocabulary.
        right: tensors of a model with layers that add nothing; the head proposes what it says.
        seed: of the weights.
        changes: of the head's config.
    """
    hidden, vocab, dim = model["hidden_size"], model["vocab_size"], 16
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": dim,
        "vocab_size": vocab,
        "draft_vocab_size": drafted,
        "rope_theta": 1000.0,
        "max_position_embeddings": 4096,
        **changes,
    }
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        **{f"midlayer.{n}.weight": (hidden,) for n in ("hidden_norm", "input_layernorm")},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (4 * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (2 * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (2 * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, 4 * dim),
        "midlayer.mlp.gate_proj.weight": (48, hidden),
        "midlayer.mlp.up_proj.weight": (48, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 48),
    }
    tensors = {name: random_tensor(name, s, seed, less_one=False) for name, s in shapes.items()}
    ids = np.sort(np.random.default_rng(seed).choice(vocab, drafted, replace=False))
    tensors["d2t"] = ids - np.arange(drafted)
    tensors["t2d"] = np.isin(np.arange(vocab), ids)
    if right is not None:
        tensors["lm_head.weight"] = right["lm_head.weight"][ids]
    return write(folder, config, tensors, None)


def dflash_checkpoint(
    folder: Path, model: dict[str, Any], *, taps: list[int], seed: int = 5, **changes: object
) -> Path:
    """A random block draft of two layers for a model with this config, the second with a window."""
    hidden, dim, heads, kv = model["hidden_size"], 16, 4, 2
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": model["vocab_size"],
        "rope_theta": 1000.0,
        "max_position_embeddings": 4096,
        "block_size": 8,
        "num_target_layers": model["num_hidden_layers"],
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": 2},
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 24,
        **changes,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * hidden),
        "norm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        front = f"layers.{index}."
        shapes |= {f"{front}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        shapes |= {f"{front}self_attn.{n}_norm.weight": (dim,) for n in "qk"}
        shapes |= {
            f"{front}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{front}self_attn.k_proj.weight": (kv * dim, hidden),
            f"{front}self_attn.v_proj.weight": (kv * dim, hidden),
            f"{front}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{front}mlp.gate_proj.weight": (48, hidden),
            f"{front}mlp.up_proj.weight": (48, hidden),
            f"{front}mlp.down_proj.weight": (hidden, 48),
        }
    tensors = {name: random_tensor(name, s, seed, less_one=False) for name, s in shapes.items()}
    return write(folder, config, tensors, None)
