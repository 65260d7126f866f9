"""The names of each family's tensors in GGUF files, and in transformers."""

import re

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = {**_COMMON, **_DENSE, "ffn_norm": "post_attention_layernorm"}
_QWEN3_MOE = {
    **_COMMON,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_GEMMA3 = {
    **_COMMON,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_FAMILIES = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3moe": _QWEN3_MOE,
    "gemma3": _GEMMA3,
    "gpt-oss": _GPT_OSS,
}

ARCHITECTURES = tuple(_FAMILIES)
ROPE_FACTORS = "rope_freqs.weight"  # follows from the config of transformers


def hf_name(architecture: str, name: str) -> str | None:
    """The name that transformers has for a tensor; None for one that the family has not."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    module = _FAMILIES[architecture].get(match[2]) if match else None
    if match is None or module is None:
        return None
    path = f"model.layers.{match[1]}.{module}"
    return path if module == "self_attn.sinks" else f"{path}.{match[3]}"
