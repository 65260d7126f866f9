"""K2 Horizon in numpy, for the reference logits; transformers has no class for it.

The formulas are those that vLLM, oMLX and llama.cpp's fork share. T = tokens, D = a head's numbers.
"""

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor under its published name."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    table = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        table |= {f"{path}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        table |= _attention_shapes(config, f"{path}.self_attn", q, kv, layer)
        if not _sparse(config, layer):
            table |= _mlp_shapes(f"{path}.mlp", hidden, config["intermediate_size"])
            continue
        count, inner = config["num_experts"], config["moe_intermediate_size"]
        table |= _router_shapes(config, f"{path}.mlp.gate", count)
        for expert in range(count):
            table |= _mlp_shapes(f"{path}.mlp.experts.{expert}", hidden, inner)
        shared = inner * config["num_shared_experts"]
        table |= _mlp_shapes(f"{path}.mlp.shared_experts", hidden, shared)
    return table


def _attention_shapes(
    config: Config, path: str, q: int, kv: int, layer: int
) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    table: dict[str, tuple[int, ...]] = {
        f"{path}.q_proj.weight": (q, hidden),
        f"{path}.k_proj.weight": (kv, hidden),
        f"{path}.o_proj.weight": (hidden, q),
    }
    if config["query_key_norm"]:
        table |= {f"{path}.q_norm.weight": (q,), f"{path}.k_norm.weight": (kv,)}
    if config.get("attention_gate_func"):
        table[f"{path}.gate_proj.weight"] = (q, hidden)
    count = config.get("mova_num_experts", 0)
    if not count or not _sparse(config, layer):
        return table | {f"{path}.v_proj.weight": (kv, hidden)}
    table |= _router_shapes(config, f"{path}.v_router", count)
    return table | {f"{path}.v_experts.{i}.weight": (kv, hidden) for i in range(count)}


def _router_shapes(config: Config, path: str, count: int) -> dict[str, tuple[int, ...]]:
    bias = {f"{path}.bias": (count,)} if config["moe_gate_bias"] else {}
    return {f"{path}.weight": (count, config["hidden_size"]), **bias}


def _mlp_shapes(path: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    rows = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{path}.{name}_proj.weight": shape for name, shape in rows.items()}


def _sparse(config: Config, layer: int) -> bool:
    return bool(config["num_experts"]) and layer not in config["mlp_only_layers"]


def logits(config: Config, tensors: Tensors, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """Logits (T, vocab_size), and the smallest distance at which an expert was left out."""
    gaps = [1.0]
    x = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        normed = _norm(config, x, tensors[f"{path}.input_layernorm.weight"])
        x = x + _attention(config, tensors, f"{path}.self_attn", normed, gaps)
        normed = _norm(config, x, tensors[f"{path}.post_attention_layernorm.weight"])
        if f"{path}.mlp.gate.weight" not in tensors:
            x = x + _mlp(tensors, f"{path}.mlp", normed)
            continue
        weights = _routed(config, tensors, f"{path}.mlp.gate", normed, "num_experts_per_tok", gaps)
        for expert in range(config["num_experts"]):
            y = _mlp(tensors, f"{path}.mlp.experts.{expert}", normed)
            x = x + weights[:, expert, None] * y
        x = x + _mlp(tensors, f"{path}.mlp.shared_experts", normed)
    x = _norm(config, x, tensors["model.norm.weight"])
    return (x @ tensors["lm_head.weight"].T).astype(np.float32), min(gaps)


def _norm(config: Config, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """An RMS norm over each group of the hidden state."""
    parts = x.reshape(len(x), config["layernorm_num_groups"], -1)
    square = np.square(parts).mean(-1, keepdims=True)
    return (parts / np.sqrt(square + config["rms_norm_eps"])).reshape(x.shape) * weight


def _attention(
    config: Config, tensors: Tensors, path: str, x: np.ndarray, gaps: list[float]
) -> np.ndarray:
    """All tokens see themselves and those before them. (T, hidden)"""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    turned = []
    for name, count in (("q", heads), ("k", kv_heads)):
        vectors = (x @ tensors[f"{path}.{name}_proj.weight"].T).reshape(len(x), count, -1)
        if config["query_key_norm"]:
            square = np.square(vectors).mean(-1, keepdims=True)
            weight = tensors[f"{path}.{name}_norm.weight"].reshape(count, -1)
            vectors = vectors / np.sqrt(square + config["rms_norm_eps"]) * weight
        turned.append(_turned(config, vectors))
    queries, keys = turned
    if f"{path}.v_router.weight" in tensors:
        key = "mova_num_experts_per_tok"
        weights = _routed(config, tensors, f"{path}.v_router", x, key, gaps)
        values = sum(
            weights[:, i, None] * _silu(x @ tensors[f"{path}.v_experts.{i}.weight"].T)
            for i in range(config["mova_num_experts"])
        )
    else:
        values = x @ tensors[f"{path}.v_proj.weight"].T
    values = values.reshape(len(x), kv_heads, -1)
    outputs = []
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = queries[:, head] @ keys[:, shared].T / np.sqrt(config["head_dim"])
        scores[np.triu_indices(len(x), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(shares / shares.sum(-1, keepdims=True) @ values[:, shared])
    y = np.concatenate(outputs, -1)
    if config.get("attention_gate_func"):
        y = y * np.log2(1 + np.exp2(x @ tensors[f"{path}.gate_proj.weight"].T))
    return y @ tensors[f"{path}.o_proj.weight"].T


def _turned(config: Config, x: np.ndarray) -> np.ndarray:
    """Rope of x (T, heads, D): the first numbers of each half of a head turn."""
    half, pairs = x.shape[-1] // 2, config["rope_head_dim"] // 2
    rates = config["rope_theta"] ** (-np.arange(pairs) / pairs)
    angles = (np.arange(len(x))[:, None] * rates)[:, None]  # (T, 1, pairs)
    first, second = x[..., :pairs], x[..., half : half + pairs]
    y = x.copy()
    y[..., :pairs] = first * np.cos(angles) - second * np.sin(angles)
    y[..., half : half + pairs] = second * np.cos(angles) + first * np.sin(angles)
    return y


def _routed(
    config: Config, tensors: Tensors, path: str, x: np.ndarray, key: str, gaps: list[float]
) -> np.ndarray:
    """Weights of all experts (T, E); 0 of those that are not chosen."""
    scores = 1 / (1 + np.exp(-(x @ tensors[f"{path}.weight"].T)))
    ranks, k = scores + tensors.get(f"{path}.bias", 0.0), config[key]
    ordered = np.sort(ranks, -1)
    gaps.append(float((ordered[:, -k] - ordered[:, -k - 1]).min()))
    scores[ranks < ordered[:, -k, None]] = 0.0
    return scores / scores.sum(-1, keepdims=True) * config["router_scaling_factor"]


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _mlp(tensors: Tensors, path: str, x: np.ndarray) -> np.ndarray:
    gate, up, down = (tensors[f"{path}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (_silu(x @ gate.T) * (x @ up.T)) @ down.T
