"""GGUF files written with the `gguf` package: random blocks, tiny models, tokenizers. No mlxinfer.

Weights go in as llama.cpp's converter puts them: Q and K of the llama architecture permuted for its
rotary embedding, Gemma's norms plus one, experts stacked.
"""

import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


_HALVES = {  # where the scales of a block lie, in bytes
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}


def random_blocks(kind: Kind, num_rows: int, num_values: int, seed: int) -> np.ndarray:
    """(num_rows, bytes of a row) uint8: any codes, scales that are finite when dequantised."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    count = num_rows * num_values // values
    blocks = rng.integers(0, 256, (4 * count, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(96, 160, len(blocks))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        finite = np.isfinite(gguf.dequantize(blocks, kind)).all(axis=1)
    return blocks[finite][:count].reshape(num_rows, -1)


def write_model(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kinds: dict[str, Kind] | None = None,
    rope_factors: np.ndarray | None = None,
    tokenizer: dict[str, Any] | None = None,
    split: int = 0,
) -> None:
    """A checkpoint as llama.cpp's converter would write it.

    Args:
        tensors: float32 by the names of transformers.
        kinds: store those with their GGUF names here so; K- and IQ-quants as random codes.
        split: the most tensors in one file; 0: one file.
    """
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    _add_metadata(writer, config)
    _add_tokenizer(writer, tokenizer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    for name, values in as_llama_cpp(config, tensors).items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, _blocks(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(values: np.ndarray, kind: Kind) -> np.ndarray:
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        blocks = random_blocks(kind, *values.shape, seed=int(kind))
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = blocks.reshape(-1, size)
    rng = np.random.default_rng(int(kind))
    for at in _HALVES[kind]:
        scales = rng.uniform(1e-4, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(values), -1)


def llama3_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Divisors of the rotary frequencies, from the formula of Llama 3.1's reference code."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    dims, context, factor = config["head_dim"], scaling["original_max_position_embeddings"], 8.0
    factors = []
    for pair in range(dims // 2):
        wave = 2 * np.pi * config["rope_theta"] ** (2 * pair / dims)
        if wave < context / 4.0:
            factors.append(1.0)
        elif wave > context / 1.0:
            factors.append(factor)
        else:
            smooth = (context / wave - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


def as_llama_cpp(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names and values as in a GGUF file."""
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if ".experts." in name and config["model_type"] != "gpt_oss":
            block, _, rest = name.partition(".mlp.experts.")
            index, part, _ = rest.split(".")
            stem = f"blk.{block.split('.')[2]}.{_LAYER[f'mlp.{part}']}_exps.weight"
            experts.setdefault(stem, {})[int(index)] = values
        else:
            result |= _renamed(config, name, values)
    stacked = {
        stem: np.stack([parts[i] for i in range(len(parts))]) for stem, parts in experts.items()
    }
    return result | stacked


def _renamed(config: dict[str, Any], name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    family = config["model_type"]
    if family == "gemma3_text" and name.endswith("norm.weight"):
        values = values + np.float32(1.0)
    module, _, leaf = name.rpartition(".")
    if module in top:
        return {f"{top[module]}.{leaf}": values}
    _, _, layer, rest = name.split(".", 3)
    prefix = f"blk.{layer}."
    if rest == "self_attn.sinks":
        return {f"{prefix}attn_sinks.weight": values}
    if family == "gpt_oss" and ".experts." in name:
        return {f"{prefix}{stem}": part for stem, part in _gpt_oss(rest, values).items()}
    module = rest.rpartition(".")[0]
    stem = _LAYER[module]
    if module == "post_attention_layernorm" and family in ("gemma3_text", "gpt_oss"):
        stem = "post_attention_norm"
    if family in ("llama", "mistral") and stem in ("attn_q", "attn_k"):
        key = "num_attention_heads" if stem == "attn_q" else "num_key_value_heads"
        values = _permuted(values, config[key])
    return {f"{prefix}{stem}.{leaf}": values}


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head become neighbours, as the rotary embedding of llama.cpp wants them."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _gpt_oss(rest: str, values: np.ndarray) -> dict[str, np.ndarray]:
    part = rest.removeprefix("mlp.experts.")
    leaf = "bias" if part.endswith("_bias") else "weight"
    if leaf == "weight":
        values = values.swapaxes(1, 2)
    if part.startswith("down_proj"):
        return {f"ffn_down_exps.{leaf}": values}
    return {f"ffn_gate_exps.{leaf}": values[:, ::2], f"ffn_up_exps.{leaf}": values[:, 1::2]}


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    family = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        length = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(length)
    if family in ("mistral", "gemma3_text", "gpt_oss") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any] | None) -> None:
    if tokenizer is None:
        return
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    if "pre" in tokenizer:
        writer.add_tokenizer_pre(tokenizer["pre"])
    if "merges" in tokenizer:
        writer.add_token_merges(tokenizer["merges"])
    if "scores" in tokenizer:
        writer.add_token_scores(tokenizer["scores"])
    for name, index in tokenizer.get("ids", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, flag in tokenizer.get("flags", {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    if "template" in tokenizer:
        writer.add_chat_template(tokenizer["template"])
