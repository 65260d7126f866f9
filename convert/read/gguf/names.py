"""The names of each family's tensors in GGUF files, and in transformers.

From llama.cpp (gguf-py/gguf/constants.py, tensor_mapping.py, and its converter of each family).
"""

import re
from collections.abc import Collection

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z0-9_.]+)")
_KINDS = (".weight", ".bias")
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
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def _experts(kind: str, module: str) -> dict[str, str]:
    """Matrices of experts, "exps" or the shared ones, "shexp", which transformers has at a path."""
    return {f"ffn_{part}_{kind}": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


_EXPERTS = {"ffn_gate_inp": "mlp.gate", **_experts("exps", "mlp.switch_mlp")}
_SHARED_EXPERTS = {
    **_experts("shexp", "mlp.shared_experts"),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_LLAMA = {**_COMMON, **_DENSE, "ffn_norm": "post_attention_layernorm"}
_QWEN3_MOE = {**_COMMON, **_EXPERTS, "ffn_norm": "post_attention_layernorm"}
_GEMMA3 = {
    **_COMMON,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA3,
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GPT_OSS = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    **_experts("exps", "mlp.experts"),
}
_CONNECTION = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_DELTA_NET = {
    **_COMMON,
    **_DENSE,
    **_EXPERTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_dt": "linear_attn.dt_bias",  # as Ollama writes it
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_experts("shexp", "mlp.shared_expert"),
}
_QWEN4_EXP = {
    **_DELTA_NET,
    **{
        f"hc_{theirs}_{part}": f"{ours}_hyper_connection.{module}"
        for theirs, ours in (("attn", "attn"), ("ffn", "mlp"))
        for part, module in {**_CONNECTION, "inject": "block_inject_weight"}.items()
    },
    **{f"ple_{part}": f"ple.{part}_proj" for part in ("key", "value")},
    **{f"ple_{part}": f"ple.{part}" for part in ("norm_key", "norm_query", "norm_conv", "conv1d")},
    **{f"indexer.{part}_proj": f"self_attn.indexer.index_{part}_proj" for part in "qk"},
    **{f"indexer.{part}_norm": f"self_attn.indexer.{part}_layernorm" for part in "qk"},
}
_LFM2 = {
    **{stem: path for stem, path in _COMMON.items() if not stem.endswith(("_norm", "_output"))},
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.switch_mlp.gate_proj",
    "ffn_up_exps": "feed_forward.switch_mlp.up_proj",
    "ffn_down_exps": "feed_forward.switch_mlp.down_proj",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_GLM4 = {
    **_COMMON,
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLM4_MOE = {
    **_COMMON,
    **_DENSE,
    **_EXPERTS,
    **_SHARED_EXPERTS,
    "post_attention_norm": "post_attention_layernorm",
}
_DEEPSEEK2 = {
    **_LLAMA,
    **_EXPERTS,
    **_SHARED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",  # split and turned, as MLX checkpoints have it too
    "attn_v_b": "self_attn.unembed_out",
}
_KIMI_DELTA = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}_{end}": f"self_attn.{part}_{end}_proj" for part in "fg" for end in "ab"},
    "ssm_a": "self_attn.A_log",
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_STREAMS = {
    f"hc_{block}_{part}.weight": f"hc_{block}_{part}"
    for block in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
_COMPRESSOR = {"kv": "kv_proj", "gate": "gate_proj", "norm": "kv_norm"}
_DEEPSEEK4 = {
    **{stem: path for stem, path in _DEEPSEEK2.items() if "kv_b" not in stem},
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    "indexer.attn_q_b": "self_attn.indexer.q_b_proj",
    "indexer.proj": "self_attn.indexer.weights_proj",
    **_STREAMS,
    **{
        f"{theirs}_compressor_{part}": f"self_attn.{ours}compressor.{module}"
        for theirs, ours in (("attn", ""), ("indexer", "indexer."))
        for part, module in _COMPRESSOR.items()
    },
    "attn_compressor_ape.weight": "self_attn.compressor.position_bias",
    "indexer_compressor_ape.weight": "self_attn.indexer.compressor.position_bias",
}
_SANDWICH = {  # norms behind each block alone
    **_COMMON,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    **_LLAMA,
    "ffn_gate_inp": "block_sparse_moe.gate",
    **_experts("exps", "block_sparse_moe.switch_mlp"),
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_HUNYUAN = {
    **_LLAMA,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_ERNIE_MOE = {
    **_LLAMA,
    **_EXPERTS,
    **_SHARED_EXPERTS,
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
}
_HY3 = {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS}
_HY3 |= {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_AFMOE = {
    **_HY3,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_LAGUNA = {
    **_HY3,
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
    **_experts("shexp", "mlp.shared_expert"),
}
_STEP = {
    **_LLAMA,
    "attn_gate": "self_attn.g_proj",
    "ffn_gate_inp": "moe.gate",
    "exp_probs_b.bias": "moe.router_bias",
    **_experts("exps", "moe"),
    **_experts("shexp", "share_expert"),
}
_SARVAM = {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS, "attn_qkv": "self_attn.qkv_proj"}
_LLAMA4 = {
    **_COMMON,
    "ffn_norm": "post_attention_layernorm",
    **{stem: path.replace("mlp.", "feed_forward.") for stem, path in _DENSE.items()},
    "ffn_gate_inp": "feed_forward.router",
    **_experts("exps", "feed_forward.switch_mlp"),
    **_experts("shexp", "feed_forward.shared_expert"),
}
_GRANITE_SWA = {
    **_LLAMA,
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_IN_MAMBA = {stem: f"mamba.{module}" for stem, module in _MAMBA.items()}
_FALCON_H1 = {
    **_COMMON,
    **_IN_MAMBA,
    "ffn_norm": "pre_ff_layernorm",
    **{stem: path.replace("mlp.", "feed_forward.") for stem, path in _DENSE.items()},
}
_NEMOTRON_H = {  # a block is one mixer, whatever its kind
    **{stem: path.replace("self_attn.", "mixer.") for stem, path in _COMMON.items()},
    **{stem: f"mixer.{module}" for stem, module in _MAMBA.items()},
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{
        f"ffn_{part}_{kind}": f"mixer.{module}.{part}_proj"
        for part in ("up", "down")
        for kind, module in (("exps", "switch_mlp"), ("shexp", "shared_experts"))
    },
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_HUNYUAN_MOE = {
    **_HUNYUAN,
    **_EXPERTS,
    "ffn_gate_inp": "mlp.gate.wg",
    **_experts("shexp", "mlp.shared_mlp"),
}
_GRANITE_HYBRID = {
    **_LLAMA,
    **_IN_MAMBA,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_experts("exps", "block_sparse_moe.switch_mlp"),
    **_experts("shexp", "mlp"),
}
_INDEXED = {
    **_DEEPSEEK2,
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_QWEN2_MOE = {
    **_QWEN3_MOE,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_experts("shexp", "mlp.shared_expert"),
}
_STABLELM = {stem: path for stem, path in _LLAMA.items() if not stem.endswith(("q_norm", "k_norm"))}
_PHI2 = {**_STABLELM, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_GEMMA3N = {
    **_GEMMA3,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_MUSE = {
    **{stem: path for stem, path in _GEMMA3.items() if not stem.endswith(("q_norm", "k_norm"))},
    "attn_gate": "self_attn.gate_proj",
}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_STARCODER2 = {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_DOTS1 = {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS}
_MINIMAX_M3 = {
    **_DOTS1,
    **{
        f"indexer.{part}_{kind}": f"self_attn.indexer.{part}_{kind}"
        for part in "qk"
        for kind in ("proj", "norm")
    },
}
_BERT = {
    **_COMMON,
    **_DENSE,
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
_NOMIC_BERT = {**_BERT, "attn_qkv": "self_attn.qkv_proj"}
_MODERN_BERT = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OTHERS = {  # the families whose names are not those of Llama
    "bailingmoe2": _SARVAM,
    "bert": _BERT,
    "nomic-bert": _NOMIC_BERT,
    "modern-bert": _MODERN_BERT,
    **dict.fromkeys(("gemma-embedding", "gemma2", "gemma3"), _GEMMA3),
    **dict.fromkeys(("llama", "minimax-m2"), _MIXTRAL),
    "afmoe": _AFMOE,
    **dict.fromkeys(("cohere2moe", "exaone-moe", "hy_v3"), _HY3),
    **dict.fromkeys(("deepseek32", "glm-dsa"), _INDEXED),
    "deepseek4": _DEEPSEEK4,
    "dots1": _DOTS1,
    "ernie4_5-moe": _ERNIE_MOE,
    **dict.fromkeys(("exaone4", "olmo2"), _SANDWICH),
    "gemma3n": _GEMMA3N,
    "granite_swa": _GRANITE_SWA,
    **dict.fromkeys(("granitehybrid", "granitemoe"), _GRANITE_HYBRID),
    "hunyuan-dense": _HUNYUAN,
    "falcon-h1": _FALCON_H1,
    "hunyuan-moe": _HUNYUAN_MOE,
    "laguna": _LAGUNA,
    "llama4": _LLAMA4,
    **dict.fromkeys(("mellum", "olmoe", "qwen3vlmoe", "qwen3moe"), _QWEN3_MOE),
    "minimax-m3": _MINIMAX_M3,
    **dict.fromkeys(("mistral4", "deepseek2"), _DEEPSEEK2),
    "muse-glimmer": _MUSE,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
    "phi2": _PHI2,
    "phi3": _PHI3,
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
    "step35": _STEP,
    "qwen2moe": _QWEN2_MOE,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _DELTA_NET),
    "qwen4exp": _QWEN4_EXP,
    "gemma4": _GEMMA4,
    "gpt-oss": _GPT_OSS,
    **dict.fromkeys(("lfm2", "lfm2moe"), _LFM2),
    "glm4": _GLM4,
    "glm4moe": _GLM4_MOE,
    "bailingmoe3": {
        **_DEEPSEEK2,
        **_KIMI_DELTA,
        "attn_gate": "self_attn.g_proj",
        "ssm_f_a": "self_attn.f_proj",
        "ssm_g_a": "self_attn.g_proj",
    },
    "apertus": {**_LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "chatglm": {**_LLAMA, "ffn_up": "mlp.gate_up_proj"},
    "glm5-next": {
        **_INDEXED,
        **_KIMI_DELTA,
        **_STREAMS,
        "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
        "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
    },
    "kimi-linear": {**_DEEPSEEK2, **_KIMI_DELTA},
    "mimo2": {
        **_LLAMA,
        **_EXPERTS,
        **_SHARED_EXPERTS,
        "attn_sinks.weight": "self_attn.attention_sink_bias",
    },
    "seed_oss": {**_LLAMA, "post_attention_norm": "post_attention_layernorm"},
}
_LFM2_TOP = {
    **_TOP,
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output_norm.weight": "model.embedding_norm.weight",
}
_GEMMA4_TOP = {
    **_TOP,
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_BIASED_TOP = {**_TOP, "output_norm.bias": "model.norm.bias"}
_NEMOTRON_TOP = {**_TOP, "output_norm.weight": "model.norm_f.weight"}
_FALCON_TOP = {**_TOP, "output_norm.weight": "model.final_layernorm.weight"}


def _ends(modules: dict[str, str]) -> dict[str, str]:
    return {f"{theirs}{k}": f"{ours}{k}" for theirs, ours in modules.items() for k in _KINDS}


_BERT_TOP = {
    **_TOP,
    **_ends({"token_embd_norm": "model.embeddings_norm"}),
    "position_embd.weight": "model.position_embeddings.weight",
    "token_types.weight": "model.token_type_embeddings.weight",
}
_TOPS = {
    "bert": {
        **_BERT_TOP,
        **_ends({"cls": "classifier.dense", "cls.output": "classifier.out_proj"}),
    },
    "nomic-bert": _BERT_TOP,
    "modern-bert": {
        **_BERT_TOP,
        **_ends({"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"}),
    },
    "qwen4exp": {
        **_TOP,
        **{
            f"output_hc_{part}.weight": f"model.hyper_connection_mixer.{module}.weight"
            for part, module in _CONNECTION.items()
        },
    },
    "deepseek4": {
        **_TOP,
        **{f"output_hc_{part}.weight": f"model.hc_head_{part}" for part in ("fn", "base", "scale")},
    },
    "qwen3": {**_TOP, "cls.output.weight": "score.weight"},
    "falcon-h1": _FALCON_TOP,
    "nemotron_h": _NEMOTRON_TOP,
    "nemotron_h_moe": _NEMOTRON_TOP,
    "lfm2": _LFM2_TOP,
    "lfm2moe": _LFM2_TOP,
    "gemma4": _GEMMA4_TOP,
    "gemma3n": {
        **_GEMMA4_TOP,
        "altup_proj.weight": "model.altup_projections.{}.weight",
        "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
    },
    "phi2": {**_TOP, **_ends({"output": "lm_head", "output_norm": "model.final_layernorm"})},
    **dict.fromkeys(("nemotron", "stablelm", "starcoder2"), _BIASED_TOP),
}
# Modules that predict tokens further ahead lie in blocks behind the last layer.
_AHEAD = {
    "layer_output_norm": "shared_head.norm",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_QWEN_AHEAD = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}

NUM_STREAMS = 4  # of Gemma 3n
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe", "qwen4exp")
NGRAMS = "model.layers.{}.ple.ple_embedding"
# What follows from the config of transformers.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
STREAMS = re.compile(r"model\.altup_(?:unembed_)?projections\.(\d)\.weight")  # each one of a stack
QUERY_SCALE = re.compile(r"blk\.\d+\.attn_([qk])_norm\.weight")  # of Muse Glimmer


def is_factor(architecture: str, name: str) -> bool:
    if architecture == "muse-glimmer" and QUERY_SCALE.fullmatch(name):
        return True
    return name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


def hf_names(
    architecture: str, name: str, num_layers: int, names: Collection[str] = ()
) -> tuple[str, ...]:
    """The names that transformers has for a tensor; () for one that the family has not.

    Args:
        num_layers: of the decoder; blocks from there on predict further ahead.
    """
    top = _TOPS.get(architecture, _TOP)
    if name in top:  # each stream of Gemma 3n except the first has a matrix
        return tuple(dict.fromkeys(top[name].format(i) for i in range(NUM_STREAMS - 1)))
    match = _BLOCK.fullmatch(name)
    if architecture == "qwen4exp" and name == "per_layer_token_embd.weight":
        layers = (i for i in range(num_layers) if f"blk.{i}.ple_key.weight" in names)
        return tuple(f"{NGRAMS.format(i)}.ngram_embedding.weight" for i in layers)[:1]
    if match is None:
        return ()
    index, rest = int(match[1]), match[2]
    path = f"model.layers.{index}"
    if joined := _joined(architecture, index, rest, names):
        return tuple(f"{path}.{module}" for module in joined)
    if architecture in DELTA_NETS:
        if rest in _QWEN_AHEAD:
            return (_QWEN_AHEAD[rest],) if index == num_layers else ()
        if index >= num_layers:
            path = f"mtp.layers.{index - num_layers}"
        if rest == "ssm_ba.weight":  # both in one tensor, as Qwen3-Next has them
            return tuple(f"{path}.linear_attn.in_proj_{part}.weight" for part in "ba")
    modules = _OTHERS.get(architecture, _LLAMA) | (_AHEAD if index >= num_layers else {})
    if rest in modules:  # Falcon-H1's norms have no ".weight"
        return (f"{path}.{modules[rest]}{'.weight' * rest.endswith('norm')}",)
    stem, kind = next(((rest.removesuffix(k), k) for k in _KINDS if rest.endswith(k)), ("", ""))
    return (f"{path}.{modules[stem]}{kind}",) if stem in modules else ()


def _joined(architecture: str, index: int, rest: str, names: Collection[str]) -> tuple[str, ...]:
    modules = _OTHERS.get(architecture, _LLAMA)
    recurs = f"blk.{index}.ssm_a" in names
    if rest.startswith("attn_qkv.") and not recurs and modules.get("attn_q"):
        kind = rest.removeprefix("attn_qkv.")
        is_joined = modules.get("attn_qkv", "").startswith("self_attn.")
        return () if is_joined else tuple(f"{modules[f'attn_{part}']}.{kind}" for part in "qkv")
    if modules.get("ffn_gate_exps") == "mlp.switch_mlp.gate_proj":
        experts = {"ffn_gate_up_exps.weight": "gate_up_proj", "ffn_down_exps.weight": "down_proj"}
        if rest in experts and f"blk.{index}.ffn_gate_up_exps.weight" in names:
            return (f"mlp.experts.{experts[rest]}.weight",)
    return ()
