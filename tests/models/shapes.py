"""Every tensor of a tiny checkpoint, by its name on the hub. No mlx, no torch."""

import json
from pathlib import Path
from typing import Any

from models.cases import RECORDED_CASES
from models.names import Shape, expanded

TENSORS = Path(__file__).parents[1] / "data" / "parity" / "tensors.json"
QWEN_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GEMMA = ("gemma2", "gemma3_text")  # tied unless stated
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this config, by its name on the hub."""
    if name := recorded_case(config):
        return expanded(json.loads(TENSORS.read_text())[name])
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings", config["model_type"] in GEMMA):
        table["lm_head.weight"] = (vocab, hidden)
    if config["model_type"] == "gemma4_text":
        return _gemma4(config, table)
    if config["model_type"] == "lfm2":
        return _lfm2(config)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        table |= {f"{path}.{name}.weight": (hidden,) for name in _norms(config)}
        if is_recurrent(config, layer) and config["model_type"] == "granitemoehybrid":
            table |= {f"{path}.mamba.{name}": s for name, s in _mamba(config).items()}
        elif is_recurrent(config, layer):
            table |= {f"{path}.linear_attn.{n}": s for n, s in _gated_delta(config).items()}
        else:
            table |= {f"{path}.self_attn.{name}": s for name, s in _attention(config).items()}
        if config["model_type"] == "granitemoehybrid":
            table |= {f"{path}.{name}": s for name, s in _granite_mlp(config).items()}
            continue
        if config["model_type"] in ("mixtral", "minimax_m2"):
            table |= {f"{path}.block_sparse_moe.{n}": s for n, s in _sparse_block(config).items()}
            continue
        table |= {f"{path}.mlp.{name}": s for name, s in _mlp(config, layer).items()}
    return table


def recorded_case(config: dict[str, Any]) -> str | None:
    """The case of this config, if its tensors are noted as transformers saves them."""
    for name, case in RECORDED_CASES.items():
        if all(config.get(key) == value for key, value in case.items()):
            return name
    return None


def _norms(config: dict[str, Any]) -> list[str]:
    family = config["model_type"]
    if family in ("olmo2", "olmo3", "exaone4"):
        return ["post_attention_layernorm", "post_feedforward_layernorm"]
    if family == "cohere2":
        return ["input_layernorm"]
    names = ["input_layernorm", "post_attention_layernorm"]
    if family == "glm4":
        names += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    if family in GEMMA:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return names


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family, hidden, heads = (
        config["model_type"],
        config["hidden_size"],
        config["num_attention_heads"],
    )
    if family in LATENT:
        return _latent_attention(config)
    dim = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"] * dim
    rows = {"q_proj": heads * dim, "k_proj": kv, "v_proj": kv}
    if family == "phi3":
        rows = {"qkv_proj": heads * dim + 2 * kv}
    if family in QWEN_HYBRIDS:
        rows["q_proj"] *= 2  # each head's query and its gate
    table: dict[str, tuple[int, ...]] = {f"{n}.weight": (r, hidden) for n, r in rows.items()}
    table["o_proj.weight"] = (hidden, heads * dim)
    on_qkv, on_output = _attention_biases(config)
    if on_qkv:
        table |= {f"{name}.bias": (r,) for name, r in rows.items()}
    if on_output:
        table["o_proj.bias"] = (hidden,)
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", *QWEN_HYBRIDS) or (
        family == "glm4_moe" and config["use_qk_norm"]
    ):
        table |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    if family in ("olmo2", "olmo3", "minimax_m2"):
        table |= {"q_norm.weight": (heads * dim,), "k_norm.weight": (kv,)}
    if family == "gpt_oss":
        table["sinks"] = (heads,)
    return table


def _attention_biases(config: dict[str, Any]) -> tuple[bool, bool]:
    """On Q, K and V, and on the output."""
    family, stated = config["model_type"], config.get("attention_bias", False)
    match family:
        case "qwen2":
            return True, False
        case "glm4" | "glm4_moe":
            return stated, False
        case "seed_oss":
            return config.get("attention_bias", True), config.get("attention_out_bias", False)
        case "ernie4_5":
            return config["use_bias"], config["use_bias"]
    return stated, stated


def _mlp(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config.get("intermediate_size", 0)
    if config["model_type"] in (*LATENT, "glm4_moe"):
        return _deepseek_mlp(config, layer)
    experts = config.get("num_experts", config.get("num_local_experts", 0))
    if config["model_type"] == "gpt_oss":
        return {
            "router.weight": (experts, hidden),
            "router.bias": (experts,),
            "experts.gate_up_proj": (experts, hidden, 2 * inner),
            "experts.gate_up_proj_bias": (experts, 2 * inner),
            "experts.down_proj": (experts, inner, hidden),
            "experts.down_proj_bias": (experts, hidden),
        }
    sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    if experts and sparse and layer not in config.get("mlp_only_layers", []):
        table: dict[str, tuple[int, ...]] = {"gate.weight": (experts, hidden)}
        for expert in range(experts):
            table |= _gated(f"experts.{expert}.", hidden, config["moe_intermediate_size"], False)
        if shared := config.get("shared_expert_intermediate_size"):
            table |= _gated("shared_expert.", hidden, shared, False)
            table["shared_expert_gate.weight"] = (1, hidden)
        return table
    if config["model_type"] in ("phi3", "glm4"):
        return {"gate_up_proj.weight": (2 * inner, hidden), "down_proj.weight": (hidden, inner)}
    return _gated("", hidden, inner, config.get("mlp_bias", config.get("use_bias", False)))


def _gated(prefix: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    rows = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    table: dict[str, tuple[int, ...]] = {f"{prefix}{n}.weight": s for n, s in rows.items()}
    if bias:
        table |= {f"{prefix}{name}.bias": shape[:1] for name, shape in rows.items()}
    return table


def _latent_attention(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, heads, rank = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["kv_lora_rank"],
    )
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    bias = config.get("attention_bias")
    table: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    if query_rank := config["q_lora_rank"]:
        table |= {
            "q_a_proj.weight": (query_rank, hidden),
            "q_a_layernorm.weight": (query_rank,),
            "q_b_proj.weight": (heads * (nope + rope), query_rank),
        }
        table |= {"q_a_proj.bias": (query_rank,)} if bias else {}
    else:
        table["q_proj.weight"] = (heads * (nope + rope), hidden)
    if bias:
        table |= {"kv_a_proj_with_mqa.bias": (rank + rope,), "o_proj.bias": (hidden,)}
    return table


def _deepseek_mlp(config: dict[str, Any], layer: int) -> dict[str, Shape]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    dense = ["dense"] * config["first_k_dense_replace"] + ["sparse"] * config["num_hidden_layers"]
    if config.get("mlp_layer_types", dense)[layer] == "dense":
        return _gated("", hidden, config["intermediate_size"], False)
    experts = config["n_routed_experts"]
    table: dict[str, Shape] = {"gate.weight": (experts, hidden)}
    if config["model_type"] != "deepseek_v2":
        table["gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        table |= _gated(f"experts.{expert}.", hidden, inner, False)
    return table | _gated("shared_experts.", hidden, inner * config["n_shared_experts"], False)


def _sparse_block(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    table: dict[str, Shape] = {"gate.weight": (experts, hidden)}
    if config["model_type"] == "minimax_m2":
        table["e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        table |= {f"experts.{expert}.w{n}.weight": (inner, hidden) for n in (1, 3)}
        table[f"experts.{expert}.w2.weight"] = (hidden, inner)
    return table


def is_recurrent(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer of this config is Gated DeltaNet or Mamba-2."""
    if config["model_type"] not in (*QWEN_HYBRIDS, "granitemoehybrid"):
        return False
    if types := config.get("layer_types"):
        return types[layer] in ("linear_attention", "mamba")
    return bool((layer + 1) % config["full_attention_interval"])


def _gated_delta(config: dict[str, Any]) -> dict[str, Shape]:
    hidden = config["hidden_size"]
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
    rows |= {"in_proj_b": heads, "in_proj_a": heads}
    if config["model_type"] == "qwen3_next":
        rows = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    return {f"{name}.weight": (count, hidden) for name, count in rows.items()} | {
        "conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }


def _mamba(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config["mamba_expand"] * hidden
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    rows = inner + channels + heads
    table: dict[str, Shape] = {
        "in_proj.weight": (rows, hidden),
        "out_proj.weight": (hidden, inner),
        "conv1d.weight": (channels, 1, config["mamba_d_conv"]),
        "norm.weight": (inner,),
    }
    table |= dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    if config["mamba_conv_bias"]:
        table["conv1d.bias"] = (channels,)
    if config["mamba_proj_bias"]:
        table |= {"in_proj.bias": (rows,), "out_proj.bias": (hidden,)}
    return table


def _granite_mlp(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, inner = config["hidden_size"], config["shared_intermediate_size"]
    table: dict[str, Shape] = {
        "shared_mlp.input_linear.weight": (2 * inner, hidden),
        "shared_mlp.output_linear.weight": (hidden, inner),
    }
    if experts := config["num_local_experts"]:
        inner = config["intermediate_size"]
        table |= {
            "block_sparse_moe.input_linear.weight": (experts, 2 * inner, hidden),
            "block_sparse_moe.output_linear.weight": (experts, hidden, inner),
            "block_sparse_moe.router.layer.weight": (experts, hidden),
        }
    return table


def _lfm2(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.embedding_norm.weight": (hidden,),
    }
    if not config.get("tie_embedding", config.get("tie_word_embeddings")):
        table["lm_head.weight"] = (vocab, hidden)
    inner = config.get("intermediate_size") if not config["block_auto_adjust_ff_dim"] else 80
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        table |= {f"{path}.{name}.weight": (hidden,) for name in ("operator_norm", "ffn_norm")}
        table |= {f"{path}.feed_forward.w{n}.weight": (inner, hidden) for n in (1, 3)}
        table[f"{path}.feed_forward.w2.weight"] = (hidden, inner)
        attends = layer in config.get("full_attn_idxs", [1])
        table |= {f"{path}.{n}": s for n, s in _lfm2_mixer(config, attends).items()}
    return table


def _lfm2_mixer(config: dict[str, Any], attends: bool) -> dict[str, Shape]:
    hidden = config["hidden_size"]
    dim = hidden // config["num_attention_heads"]
    if attends:
        kv = config["num_key_value_heads"] * dim
        rows = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "out_proj": hidden}
        table: dict[str, Shape] = {f"self_attn.{n}.weight": (r, hidden) for n, r in rows.items()}
        return table | {f"self_attn.{n}_layernorm.weight": (dim,) for n in "qk"}
    table = {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.out_proj.weight": (hidden, hidden),
        "conv.conv.weight": (hidden, 1, config["conv_L_cache"]),
    }
    if config.get("conv_bias"):
        table |= {"conv.in_proj.bias": (3 * hidden,), "conv.out_proj.bias": (hidden,)}
        table["conv.conv.bias"] = (hidden,)
    return table


def _gemma4(config: dict[str, Any], table: dict[str, Shape]) -> dict[str, Shape]:
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        table[f"{path}.layer_scalar"] = (1,)
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        table |= {f"{path}.{name}_layernorm.weight": (hidden,) for name in names}
        table |= {f"{path}.self_attn.{n}": s for n, s in _gemma4_attention(config, layer).items()}
        inner = config["intermediate_size"]
        table |= {f"{path}.mlp.{n}": s for n, s in _gated("", hidden, inner, False).items()}
        if config["enable_moe_block"]:
            table |= {f"{path}.{n}": s for n, s in _gemma4_experts(config).items()}
    return table


def _gemma4_attention(config: dict[str, Any], layer: int) -> dict[str, Shape]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    names = ["k_proj", "v_proj"]
    if config["layer_types"][layer] == "full_attention":
        dim = config.get("global_head_dim", 40)
        if config["attention_k_eq_v"]:
            kv_heads, names = config["num_global_key_value_heads"], ["k_proj"]
    table: dict[str, Shape] = {f"{name}.weight": (kv_heads * dim, hidden) for name in names}
    table |= {f"{name}_norm.weight": (dim,) for name in "qk"}
    return table | {"q_proj.weight": (heads * dim, hidden), "o_proj.weight": (hidden, heads * dim)}


def _gemma4_experts(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["num_experts"]
    norms = (
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    )
    return {
        "router.proj.weight": (experts, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (experts,),
        "experts.gate_up_proj": (experts, 2 * inner, hidden),
        "experts.down_proj": (experts, hidden, inner),
        **{f"{name}.weight": (hidden,) for name in norms},
    }
