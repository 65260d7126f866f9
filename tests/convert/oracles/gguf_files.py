"""GGUF files as llama.cpp's converter would write them: random blocks, tiny models. No mlxinfer.

Names are those of the `gguf` package's own map. What is done to values is as in llama.cpp's
converter (conversion/llama.py, qwen.py, gemma.py, gpt_oss.py, lfm2.py, glm.py, deepseek.py).
"""

import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

Tensors = dict[str, np.ndarray]
ODD_NAMES = {
    "mistral": "llama",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
_BARE = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj", "sinks")  # without ".weight"

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
    tensors: Tensors,
    *,
    kinds: dict[str, Kind] | None = None,
    rope_factors: np.ndarray | None = None,
    tokenizer: dict[str, Any] | None = None,
    split: int = 0,
    split_kv: bool = True,
) -> None:
    """Write a float32 checkpoint.

    Args:
        tensors: by the names of transformers; `mtp.*` among them perhaps.
        kinds: store those with their GGUF names here so; K- and IQ-quants as random codes.
        split: the most tensors in one file; 0: one file.
        split_kv: K and V of latent attention as two tensors, as all but old files have them.
    """
    kind, ahead = config["model_type"], config.get("mtp_num_hidden_layers", 0)
    writer = gguf.GGUFWriter(path, architecture(kind), split_max_tensors=split)
    if kind == "gemma4_text":
        rope_factors = _gemma4_factors(config)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    for name, values in as_llama_cpp(config, tensors, split_kv=split_kv).items():
        values = np.ascontiguousarray(values, np.float32)
        if stored := (kinds or {}).get(name):
            writer.add_tensor(name, _blocks(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, values)
    _add_metadata(writer, config, ahead)
    _add_tokenizer(writer, tokenizer)
    finish(writer)


def architecture(model_type: str) -> str:
    """What llama.cpp calls it."""
    return ODD_NAMES.get(model_type) or model_type.removesuffix("_text").replace("_", "")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_llama_cpp(config: dict[str, Any], tensors: Tensors, *, split_kv: bool = True) -> Tensors:
    """Names and values as in a GGUF file."""
    arch, ahead = architecture(config["model_type"]), config.get("mtp_num_hidden_layers", 0)
    (number,) = (index for index, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"] + ahead)
    return {
        names.get_name(name, try_suffixes=(".weight", ".bias")) or _special(name): values
        for name, values in _changed(config, _stacked(tensors), split_kv).items()
    }


def _blocks(values: np.ndarray, kind: Kind) -> np.ndarray:
    if kind == Kind.Q6_K:
        return _q6_k(values)
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


def _q6_k(values: np.ndarray) -> np.ndarray:
    """Blocks of Q6_K, which the package does not write, with one scale for all."""
    step = np.float32(np.float16(np.abs(values).max() / 31))
    codes = np.clip(np.rint(values / step) + 32, 0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lows = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(codes)
    parts = [lows.reshape(count, 128), highs.reshape(count, 64), np.ones((count, 16), np.uint8)]
    scales = np.full((count, 1), step, np.float16).view(np.uint8).reshape(count, 2)
    return np.concatenate([*parts, scales], axis=1).reshape(len(values), -1)


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


def _special(name: str) -> str:
    """What the map leaves to the converter."""
    layer = name.split(".")[2]
    ends = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "e_score_correction_bias": "exp_probs_b.bias",
        "eh_proj.weight": "nextn.eh_proj.weight",
        "enorm.weight": "nextn.enorm.weight",
        "hnorm.weight": "nextn.hnorm.weight",
        "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    }
    (result,) = (short for end, short in ends.items() if name.endswith(end))
    return f"blk.{layer}.{result}"


def _stacked(tensors: Tensors) -> Tensors:
    collected: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = values
        else:
            collected[name + (".weight" if name.endswith(_BARE) else "")] = values
    for name, parts in experts.items():
        # LFM2's map knows its stacks by a shorter name alone.
        short = name.removeprefix("model.") if ".feed_forward." in name else name
        collected[short] = np.stack([parts[i] for i in range(len(parts))])
    return collected


def _changed(config: dict[str, Any], tensors: Tensors, split_kv: bool) -> Tensors:
    collected: Tensors = {}
    for name, values in tensors.items():
        kind = config["model_type"]
        if kind.startswith(("qwen3_next", "qwen3_5")):
            collected |= _qwen(config, name, values)
        elif kind == "gpt_oss" and ".experts." in name:
            collected |= _gpt_oss(name.removesuffix(".weight"), values)
        elif kind == "gemma3_text" and name.endswith("norm.weight"):
            collected[name] = values + np.float32(1.0)
        elif kind in ("llama", "mistral") and (part := re.search(r"\.([qk])_proj\.", name)):
            heads = "num_attention_heads" if part[1] == "q" else "num_key_value_heads"
            collected[name] = _permuted(values, config[heads])
        elif name.endswith("conv.conv.weight"):
            collected[name] = values.squeeze(1)
        elif name.endswith("expert_bias"):
            collected[f"{name}.bias"] = values
        elif name.endswith("kv_b_proj.weight") and split_kv:
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            both = values.reshape(heads, nope + config["v_head_dim"], -1)
            collected[name.replace("kv_b", "k_b")] = both[:, :nope].swapaxes(1, 2)
            collected[name.replace("kv_b", "v_b")] = both[:, nope:]
        else:
            collected[name] = values
    return collected


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head become neighbours, as the rotary embedding of llama.cpp wants them."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _gpt_oss(name: str, values: np.ndarray) -> Tensors:
    path, _, part = name.rpartition(".")
    leaf = "bias" if part.endswith("_bias") else "weight"
    if leaf == "weight":
        values = values.swapaxes(1, 2)
    if part.startswith("down_proj"):
        return {f"{path}.down_proj.{leaf}": values}
    halves = {"gate": values[:, ::2], "up": values[:, 1::2]}
    return {f"{path}.{half}_proj.{leaf}": part for half, part in halves.items()}


def _qwen(config: dict[str, Any], name: str, values: np.ndarray) -> Tensors:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if name.startswith("mtp."):
        name = _ahead(name, config["num_hidden_layers"])
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + np.float32(1.0)
    if "in_proj_qkvz" in name:
        served = heads // keys * dim
        parts = np.split(
            values.reshape(keys, -1, values.shape[-1]),
            np.cumsum([key_dim, key_dim, served]),
            axis=1,
        )
        q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
        path = name.partition("in_proj")[0]
        return {
            f"{path}in_proj_qkv.weight": np.concatenate([q, k, v]),
            f"{path}in_proj_z.weight": z,
        }

    def tiled(part: np.ndarray, size: int) -> np.ndarray:
        if config["model_type"] == "qwen3_next":
            return part
        by_head = part.reshape(keys, heads // keys, size, *part.shape[1:])
        return by_head.swapaxes(0, 1).reshape(part.shape)

    if "conv1d" in name:
        values = values.squeeze(1)
    if "in_proj_qkv." in name or "conv1d" in name:
        values = np.concatenate([values[: -heads * dim], tiled(values[-heads * dim :], dim)])
    elif "in_proj_z" in name:
        values = tiled(values, dim)
    elif "in_proj_a." in name or "in_proj_b." in name:
        values = tiled(values, 1)
    elif name.endswith("dt_bias"):
        name, values = name.replace("dt_bias", "dt_proj.bias"), tiled(values, 1)
    elif name.endswith("A_log"):
        values = -np.exp(tiled(values, 1))
    elif "linear_attn.out_proj" in name:
        values = tiled(values.T, dim).T
    return {name: values}


def _ahead(name: str, num_layers: int) -> str:
    if name.startswith("mtp.layers."):
        _, _, index, rest = name.split(".", 3)
        return f"model.layers.{int(index) + num_layers}.{rest}"
    names = {
        "mtp.fc.weight": "eh_proj",
        "mtp.pre_fc_norm_embedding.weight": "enorm",
        "mtp.pre_fc_norm_hidden.weight": "hnorm",
        "mtp.norm.weight": "shared_head.norm",
    }
    return f"model.layers.{num_layers}.{names[name]}.weight"


def _ropes(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("rope_parameters") or {})}


_KEYS = {  # of configs: what the writer calls them
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "head_count",
    "rms_norm_eps": "layer_norm_rms_eps",
    "norm_eps": "layer_norm_rms_eps",
    "linear_conv_kernel_dim": "ssm_conv_kernel",
    "linear_key_head_dim": "ssm_state_size",
    "linear_num_key_heads": "ssm_group_count",
    "linear_num_value_heads": "ssm_time_step_rank",
    "conv_L_cache": "shortconv_l_cache",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "num_kv_shared_layers": "shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SIGMOID = ("lfm2_moe", "glm4_moe", "deepseek_v3")
_WINDOWED = ("mistral", "gemma3_text", "gpt_oss", "gemma4_text")
_TURNED = {"qwen3_next": 0.25, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}
_TURNED |= {"glm4": 0.5, "glm4_moe": 0.5}


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], ahead: int) -> None:
    kind = config["model_type"]
    writer.add_block_count(config["num_hidden_layers"] + ahead)
    if ahead:
        writer.add_nextn_predict_layers(ahead)
    if not config.get("enable_moe_block", True):
        config = {key: value for key, value in config.items() if "expert" not in key}
    for key, name in _KEYS.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{name}")(config[key])
    for name, value in _attention(config).items():
        getattr(writer, f"add_{name}")(value)
    if "linear_num_value_heads" in config:
        heads = config["linear_num_value_heads"]
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind in _SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind in _WINDOWED and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if kind != "gemma4_text":
        _add_sizes(writer, config)


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of feed-forward blocks, and how positions are turned."""
    inner = config.get("intermediate_size")
    if config.get("block_auto_adjust_ff_dim"):
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * config["block_ff_dim"] / 3))
        inner = config["block_multiple_of"] * -(-inner // config["block_multiple_of"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(inner)
    writer.add_rope_freq_base(_ropes(config)["rope_theta"])
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = scaling.get("rope_type", scaling.get("type"))
    if stretched in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(stretched))
        writer.add_rope_scaling_factor(scaling["factor"])
    if stretched == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "mscale_all_dim" in scaling:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _attention(config: dict[str, Any]) -> dict[str, Any]:
    """Heads and their sizes, by the writer's names."""
    if config["model_type"] == "gemma4_text":
        return _gemma4_attention(config)
    if "kv_lora_rank" in config:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        key = config["qk_nope_head_dim"] + rope
        heads = {"head_count_kv": 1, "key_length": rank + rope, "value_length": rank}
        mla = {"key_length_mla": key, "value_length_mla": config["v_head_dim"]}
        return {**heads, **mla, "rope_dimension_count": rope}
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    share = _ropes(config).get("partial_rotary_factor", _TURNED.get(config["model_type"], 1.0))
    heads = config["num_key_value_heads"]
    if "conv_L_cache" in config:
        attending = config.get("full_attn_idxs", range(config["num_hidden_layers"]))
        kinds = ["" if i in attending else "conv" for i in range(config["num_hidden_layers"])]
        heads = [0 if kind == "conv" else heads for kind in config.get("layer_types", kinds)]
    sizes = {"head_count_kv": heads, "key_length": dim, "value_length": dim}
    return {**sizes, "rope_dimension_count": int(dim * share)}


def _gemma4_attention(config: dict[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    count, shared = len(slides), config.get("num_kv_shared_layers", 0)
    inner, wide = config["intermediate_size"], config.get("use_double_wide_mlp", False)
    heads = config["num_key_value_heads"]
    full = config.get("num_global_key_value_heads") or heads
    sizes = {"": config["global_head_dim"], "_swa": config["head_dim"]}
    names = ("key_length", "value_length", "rope_dimension_count")
    ropes = config["rope_parameters"]
    return {
        "feed_forward_length": [inner * (1 + (wide and i >= count - shared)) for i in range(count)],
        "head_count_kv": [heads if flag else full for flag in slides],
        "sliding_window_pattern": slides,
        **{f"{name}{end}": size for name in names for end, size in sizes.items()},
        "rope_freq_base": ropes["full_attention"]["rope_theta"],
        "rope_freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def _gemma4_factors(config: dict[str, Any]) -> np.ndarray:
    """Which pairs turn in layers that see everything; the others' frequencies vanish."""
    dim = config["global_head_dim"]
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    turned = int(dim * share / 2)
    return np.array([1.0] * turned + [1e30] * (dim // 2 - turned), np.float32)


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
