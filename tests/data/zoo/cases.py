"""What `compare.py` builds: small configs of each type, and what is changed in them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

WINDOW = 8
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
SCALINGS = ({"rope_type": "linear", "factor": 4.0}, YARN)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
LONGROPE = {  # of 8 rotary numbers, for texts that are shorter than the original context
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 256,
    "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "short_mscale": 1.1,
    "long_mscale": 1.2,
}
ONE_LONGROPE = {  # as published for MiniCPM 3
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.1, 1.2, 1.3],
}
MORE = {  # scalings that only these types have
    "minicpm3": [LONGROPE],
    "phimoe": [
        {
            **LONGROPE,
            "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
        }
    ],
}
COUNTS = {  # whole numbers that choose a form, and another value of each
    **dict.fromkeys(("n_group", "num_expert_group", "decoder_sparse_step"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 2),
    **dict.fromkeys(("moe_layer_freq", "moe_layer_interval", "layer_group_size", "n_groups"), 2),
}
NO_MATTER = (  # parts of names of keys that change no logits, or are compared in other ways
    "dropout", "initializer", "output_", "return_", "use_cache", "is_decoder", "is_encoder",
    "summary_", "aux_loss", "jitter", "cross_attention", "pdrop", "gradient", "init_", "_init",
    "rescale_", "time_step_", "moe_loss", "z_loss", "tie_word", "mtp_", "upcast", "in_fp32",
    "eps", "use_mambapy", "use_mamba_kernels", "use_associative_scan", "mlp_bias_", "rope_theta",
)  # fmt: skip
BY_NAME: dict[str, str] = {}
NOT_PUBLISHED = {  # names of tensors that transformers saves, and no vendor publishes
    "longcat_flash": r"\.experts\.[45]\."  # rows of experts that compute nothing
}
CHANGES: dict[str, dict[str, Any]] = {  # besides the sizes of `zoo_configs`
    "jamba": {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "recurrent_gemma": {"num_key_value_heads": 1},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "minicpm3": {"num_key_value_heads": 4, "rope_parameters": ONE_LONGROPE},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8},
    "gpt_neox": {"intermediate_size": 256},
}


def _renamed(**names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {names.get(key, key): value for key, value in config.items()}


OLD_NAMES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gpt2": lambda config: {**config, "n_ctx": config["n_positions"]},
    "gpt_neox": _renamed(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
    "gpt_bigcode": lambda config: {**config, "n_inner": 4 * config["n_embd"]},
    "exaone": _renamed(num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon"),
    "apertus": lambda config: {**config, "post_norm": False, "qk_norm": True, "mlp_bias": False},
}


def changes(kind: str, known: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key of a config that may change logits, and the change; some keys have several."""
    if "sliding_window" in known:
        yield "sliding_window", _window(known)
    for key, change in _ropes(known.get("rope_parameters")):
        also = {"rope_theta": 777.0} if key in known else {}  # some state it twice
        yield key, {**change, **also}
    for scaling in MORE.get(kind, ()):
        yield "rope_scaling", {"rope_parameters": scaling}
    for key, value in known.items():
        if any(part in key for part in NO_MATTER):
            continue
        if key in ACTIVATIONS:
            yield key, {key: "relu" if value != "relu" else "silu"}
        elif isinstance(value, bool):
            yield key, {key: not value}
        elif isinstance(value, float):
            yield key, {key: 1.5 * value or 0.5}
        elif (key, value) == ("num_experts", 1):
            yield key, {key: 4, "num_experts_per_tok": 2}
        elif key in COUNTS:
            yield key, {key: COUNTS[key]}


def _window(known: Mapping[str, Any]) -> dict[str, Any]:
    half = known["num_hidden_layers"] // 2
    more = {
        "use_sliding_window": True,
        "max_window_layers": half,
        "layer_types": ["sliding_attention", "full_attention"] * half,
    }
    return {"sliding_window": WINDOW, **{key: more[key] for key in more if key in known}}


def _ropes(rope: dict[str, Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other bases, parts of heads that turn, and scalings; of layers that see everything."""
    if rope is None:
        return

    def changed(**own: Any) -> dict[str, Any]:
        if "full_attention" in rope:
            inner = {**rope["full_attention"], **own}
            return {"rope_parameters": {**rope, "full_attention": inner}}
        return {"rope_parameters": {**rope, **own}}

    yield "rope_theta", changed(rope_theta=777.0)
    for scaling in SCALINGS:
        yield "rope_scaling", changed(**scaling)
    if "partial_rotary_factor" in rope.get("full_attention", rope):
        yield "partial_rotary_factor", _everywhere(rope, partial_rotary_factor=0.75)


def _everywhere(rope: dict[str, Any], **own: Any) -> dict[str, Any]:
    """A change of the ropes of all layers."""
    if "full_attention" in rope:
        return {"rope_parameters": {kind: {**inner, **own} for kind, inner in rope.items()}}
    return {"rope_parameters": {**rope, **own}}
