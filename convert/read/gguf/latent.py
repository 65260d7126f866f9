"""config.json of families with latent attention: DeepSeek V2 to V4, GLM 5 and 5.3, Kimi Linear,
Ling 3, Mistral 4, Youtu.
"""

from ....errors import UnsupportedModelError
from .fields import ArchitectureFields
from .parts import (
    SIGMOID,
    SOFTMAX,
    Config,
    Shapes,
    make_family,
    ministral_ropes,
    routing_of,
    rows_of,
)

_ROOT_SOFTPLUS = 4  # expert_gating_func


def deepseek2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """DeepSeek V2 and V3, and what is built like them; older files have `kv_b` as one matrix."""
    sigmoid = facts.count("expert_gating_func") == SIGMOID or any(
        name.endswith("e_score_correction_bias") for name in shapes
    )
    sparse = facts.count("expert_count") > 0
    version = 3 if sigmoid else 2
    routing = routing_of(facts) if sparse else {}
    if sparse and not sigmoid:
        routing["topk_method"] = "greedy" if routing["n_group"] == 1 else "group_limited_greedy"
    named = (f"deepseek_v{version}", f"DeepseekV{version}ForCausalLM")
    if not sparse:
        facts.read("leading_dense_block_count")
        named = ("youtu", "YoutuForCausalLM")
    fields = make_family(*named)(facts, shapes, config)
    return fields | routing | _latent_sizes(facts, shapes, config)


def _latent_sizes(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Sizes of attention heads, and of the latent vector that the KV cache holds for them."""
    facts.read("attention.key_length", "attention.value_length")  # of what is kept, with _mla
    mla = "_mla" if facts.has("attention.key_length_mla") else ""
    rope = facts.count("rope.dimension_count")
    rank = facts.integer("attention.q_lora_rank") if facts.has("attention.q_lora_rank") else None
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope or config["head_dim"],
        "q_lora_rank": rank,
        "kv_lora_rank": facts.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": facts.integer(f"attention.key_length{mla}") - rope,
        "v_head_dim": facts.integer(f"attention.value_length{mla}"),
        "attention_bias": "model.layers.0.self_attn.kv_a_proj_with_mqa.bias" in shapes,
    }


def indexed(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """DeepSeek V3.2 and GLM 5: an index picks the tokens that a query sees."""
    glm = facts.architecture == "glm-dsa"
    named = ("glm_moe_dsa", "GlmMoeDsaForCausalLM")
    facts.expect("expert_gating_func", SIGMOID)
    made = make_family(*(named if glm else ("deepseek_v32", "DeepseekV32ForCausalLM")))
    fields = made(facts, shapes, config) | {
        **routing_of(facts),
        **_latent_sizes(facts, shapes, config),
        **_index_sizes(facts),
    }
    return fields | _whole_indexes(facts, config)


def _index_sizes(facts: ArchitectureFields) -> Config:
    return {
        "index_n_heads": facts.integer("attention.indexer.head_count"),
        "index_head_dim": facts.integer("attention.indexer.key_length"),
        "index_topk": facts.integer("attention.indexer.top_k"),
    }


def _whole_indexes(facts: ArchitectureFields, config: Config) -> Config:
    whole = facts.by_layer_or_none("attention.indexer.types", config["num_hidden_layers"])
    if whole is None:
        return {}
    return {"indexer_types": ["full" if one else "shared" for one in whole]}


def deepseek4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Beside its window a layer sees entries of few tokens through an index, or of many tokens."""
    count = config["num_hidden_layers"]
    facts.expect("expert_gating_func", _ROOT_SOFTPLUS)
    facts.expect("expert_weights_norm", True)
    facts.read("embedding_length_out")  # of all streams
    routing = routing_of(facts)
    return make_family("deepseek_v4", "DeepseekV4ForCausalLM")(facts, shapes, config) | {
        **{key: routing[key] for key in routing if "group" not in key and "dense" not in key},
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": _limit(facts),
        "sliding_window": facts.integer("attention.sliding_window"),
        "qk_rope_head_dim": facts.integer("rope.dimension_count"),
        "q_lora_rank": facts.integer("attention.q_lora_rank"),
        "o_groups": facts.integer("attention.output_group_count"),
        "o_lora_rank": facts.integer("attention.output_lora_rank"),
        **_index_sizes(facts),
        "compress_ratios": facts.by_layer("attention.compress_ratios", count),
        "compress_rope_theta": facts.number("attention.compress_rope_freq_base"),
        **_streams(facts),
        "num_hash_layers": facts.count("hash_layer_count"),
    }


def _streams(facts: ArchitectureFields) -> Config:
    return {
        "hc_mult": facts.integer("hyper_connection.count"),
        "hc_sinkhorn_iters": facts.integer("hyper_connection.sinkhorn_iterations"),
        "hc_eps": facts.number("hyper_connection.epsilon"),
    }


def _limit(facts: ArchitectureFields) -> float:
    keys, count = ("swiglu_clamp_exp", "swiglu_clamp_shexp"), facts.integer("block_count")
    limits = {limit for key in keys for limit in facts.numbers(key, count)}
    if len(limits) != 1:
        raise UnsupportedModelError(
            f"{' and '.join(keys)} in {facts.all.where} have {len(limits)} limits; supported is "
            "one for all layers."
        )
    return limits.pop()


def mistral4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Mistral Small 4, whose queries grow with their position."""
    facts.expect("expert_gating_func", SOFTMAX)
    facts.read("attention.temperature_length")  # the original context
    return make_family("mistral4", "Mistral4ForCausalLM")(facts, shapes, config) | {
        **routing_of(facts),
        **_latent_sizes(facts, shapes, config),
        **ministral_ropes(facts, config),
    }


def kimi_linear(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Delta attention, and latent attention without rope; weights are normalised always."""
    made = make_family("kimi_linear", "KimiLinearForCausalLM")(facts, shapes, config)
    return made | _with_delta(facts, shapes, config) | {"norm_topk_prob": True}


def bailing_hybrid(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Ling 3, whose decays have a bound."""
    made = make_family("bailing_hybrid", "BailingMoeV3ForCausalLM")(facts, shapes, config)
    made |= _with_delta(facts, shapes, config) | {
        "kda_safe_gate": facts.flag("kda.safe_gate", default=True),
        "kda_lower_bound": facts.all.number(facts.name("kda.gate_lower_bound")),
    }
    shared = f"model.layers.{made['first_k_dense_replace']}.mlp.shared_experts.up_proj.weight"
    made["moe_shared_expert_intermediate_size"] = (
        rows_of(shapes, shared) // made["n_shared_experts"]
    )
    limits = {
        "expert_swiglu_limit_list": "swiglu_clamp_exp",
        "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
    }
    count = facts.integer("block_count")
    stated = {ours: facts.numbers(key, count) for ours, key in limits.items() if facts.has(key)}
    return made | stated


def glm5_next(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """GLM 5.3 Flash: delta attention, and latent attention that sees the best blocks of tokens."""
    facts.expect("attention.indexer.kpool_select_tail", True)
    made = make_family("glm5_next_text", "Glm5NextForConditionalGeneration")(facts, shapes, config)
    made |= _with_delta(facts, shapes, config)
    bounded = facts.has("kda.gate_lower_bound")
    bound = facts.all.number(facts.name("kda.gate_lower_bound")) if bounded else None
    made["linear_attn_config"] |= {"gate_lower_bound": bound, "safe_gate": bounded}
    recurs = made["linear_attn_config"]["kda_layers"]
    kinds = ("indexed_attention", "linear_attention")
    layers = range(1, config["num_hidden_layers"] + 1)
    return made | {
        **_index_sizes(facts),
        **_whole_indexes(facts, config),
        **_streams(facts),
        "index_kpool": facts.integer("attention.indexer.kpool"),
        "swiglu_limit": _limit(facts),
        "layer_types": [kinds[number in recurs] for number in layers],
    }


def _with_delta(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.expect("expert_gating_func", SIGMOID)
    facts.read("attention.head_count_kv")
    rate, layers = "model.layers.{}.self_attn.A_log", range(config["num_hidden_layers"])
    recurs = [i for i in layers if rate.format(i) in shapes]
    heads = f"model.layers.{min(recurs, default=0)}.self_attn.b_proj.weight"
    delta = {
        "kda_layers": [i + 1 for i in recurs],
        "full_attn_layers": [i + 1 for i in layers if i not in recurs],
        "num_heads": rows_of(shapes, heads),
        "head_dim": facts.integer("kda.head_dim"),
        "short_conv_kernel_size": facts.integer("ssm.conv_kernel"),
    }
    sizes = routing_of(facts) | _latent_sizes(facts, shapes, config)
    return sizes | {"linear_attn_config": delta}
