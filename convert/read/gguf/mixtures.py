"""config.json of mixtures of experts whose layers differ: windows, heads and ropes by kind."""

from .fields import ArchitectureFields
from .parts import (
    KINDS,
    SIGMOID,
    SOFTMAX,
    Config,
    Shapes,
    experts_of,
    layer_types_of,
    make_family,
    number_of,
    routing_of,
    rows_of,
    window_of,
)

STEP_TURNS = 0.5  # of a head, llama.cpp's own constant


def _by_kind(facts: ArchitectureFields, config: Config) -> Config:
    theta, whole = config["rope_theta"], config["rope_scaling"] or {"rope_type": "default"}
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", theta)}
    ropes = {"full_attention": {**whole, "rope_theta": theta}, "sliding_attention": local}
    return {"rope_parameters": ropes, "rope_scaling": None}


def _kinds_of_mlp(shapes: Shapes, config: Config) -> list[str]:
    gate = "model.layers.{}.mlp.gate.weight"
    layers = range(config["num_hidden_layers"])
    return ["sparse" if gate.format(i) in shapes else "dense" for i in layers]


def mellum(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    made = make_family("mellum", "MellumForCausalLM", sliding_window=window_of)
    return made(facts, shapes, config) | {
        **experts_of(facts),
        **_by_kind(facts, config),
        "layer_types": layer_types_of(4)(facts, shapes, config),
        "mlp_layer_types": _kinds_of_mlp(shapes, config),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=True),
    }


def exaone_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    family = make_family("exaone_moe", "ExaoneMoeForCausalLM", sliding_window=window_of)
    facts.expect("expert_gating_func", SIGMOID)
    kinds = _kinds_of_mlp(shapes, config)
    return family(facts, shapes, config) | {
        **experts_of(facts),
        **routing_of(facts),
        "num_shared_experts": facts.integer("expert_shared_count"),
        "is_moe_layer": [kind == "sparse" for kind in kinds],
        "layer_types": layer_types_of(4)(facts, shapes, config),
    }


def cohere2_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    family = make_family(
        "cohere2_moe", "Cohere2MoeForCausalLM", logit_scale=number_of("logit_scale", 1)
    )
    chosen = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
    gating = facts.count("expert_gating_func") or SOFTMAX
    return family(facts, shapes, config) | {
        **experts_of(facts, size="intermediate_size"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),  # which norms there are
        "expert_selection_fn": chosen.get(gating, str(gating)),
        "norm_topk_prob": facts.flag("expert_weights_norm"),
        "num_shared_experts": facts.count("expert_shared_count"),
        "first_k_dense_replace": facts.count("leading_dense_block_count"),
        "prefix_dense_intermediate_size": facts.integer("feed_forward_length"),
        "sliding_window": window_of(facts, shapes, config),
        "layer_types": layer_types_of(4)(facts, shapes, config),
    }


def hy3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.expect("expert_gating_func", SIGMOID)
    size = facts.integer("expert_feed_forward_length")
    shared = facts.integer("expert_shared_feed_forward_length", size)
    return make_family("hy_v3", "HYV3ForCausalLM")(facts, shapes, config) | {
        **experts_of(facts),
        "num_shared_experts": shared // size,
        "mlp_layer_types": _kinds_of_mlp(shapes, config),
        "router_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "route_norm": facts.flag("expert_weights_norm", default=True),
        "qk_norm": True,
    }


def step(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Heads, windows and limits by layer; half of a head rotates where a layer sees everything."""
    facts.read("leading_dense_block_count", "moe_every_n_layers")  # tensors say where experts are
    facts.expect("expert_weights_norm", True)
    count, whole = config["num_hidden_layers"], facts.integer("block_count")
    slides = facts.by_layer("attention.sliding_window_pattern", whole)
    heads = dict(zip(slides, facts.by_layer("attention.head_count", whole), strict=True))
    ropes = _by_kind(facts, config)
    ropes["rope_parameters"]["full_attention"]["partial_rotary_factor"] = STEP_TURNS
    names = ("step3p5", "Step3p5ForCausalLM")
    return make_family(*names, sliding_window=window_of)(facts, shapes, config) | {
        **experts_of(facts, count="n_routed_experts"),
        **ropes,
        "num_attention_heads": heads.get(0, heads.get(1)),
        "num_sliding_attention_heads": heads.get(1, heads.get(0)),
        "layer_types": [KINDS[0] if one else KINDS[1] for one in slides],
        "mlp_layer_types": [
            "sparse" if f"model.layers.{i}.moe.gate.weight" in shapes else "dense"
            for i in range(count)
        ],
        "share_expert_dim": facts.integer("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "swiglu_limits": facts.numbers("swiglu_clamp_exp", whole),
        "swiglu_limits_shared": facts.numbers("swiglu_clamp_shexp", whole),
    }


def sarvam(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Sarvam 30B, and Ling 2, where rope rotates only a part of each attention head."""
    facts.expect("expert_gating_func", SIGMOID)
    return make_family("sarvam_moe", "SarvamMoEForCausalLM")(facts, shapes, config) | {
        **routing_of(facts),
        "use_qkv_bias": "model.layers.0.self_attn.qkv_proj.bias" in shapes,
        "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in shapes,
    }


def afmoe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Embeddings are scaled, and each fourth layer sees all: llama.cpp's own constants."""
    facts.expect("expert_gating_func", SIGMOID)
    return make_family("afmoe", "AfmoeForCausalLM")(facts, shapes, config) | {
        **experts_of(facts),
        "num_shared_experts": facts.count("expert_shared_count"),
        "num_dense_layers": facts.count("leading_dense_block_count"),
        "route_scale": facts.number("expert_weights_scale", 1.0),
        "route_norm": facts.flag("expert_weights_norm", default=True),
        "mup_enabled": True,
        "sliding_window": window_of(facts, shapes, config),
        "layer_types": layer_types_of(4)(facts, shapes, config),
    }


def laguna(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Heads of queries by layer; where the file has no list, each fourth layer sees all."""
    facts.expect("expert_gating_func", SIGMOID)
    facts.expect("expert_weights_norm", True)
    facts.read("leading_dense_block_count")  # tensors say which layers have experts
    count, dim = config["num_hidden_layers"], config["head_dim"]
    kinds = layer_types_of(1)(facts, shapes, config)
    if not facts.has("attention.sliding_window_pattern"):
        kinds = [KINDS[int(i % 4 == 0)] for i in range(count)]
    made = _by_kind(facts, config)
    rotated = {
        kind: facts.integer(key, dim) / dim
        for kind, key in (("full_attention", "rope.dimension_count"),
                          ("sliding_attention", "rope.dimension_count_swa"))
    }  # fmt: skip
    for kind, rope in made["rope_parameters"].items():
        rope["partial_rotary_factor"] = rotated[kind]
    heads = facts.by_layer("attention.head_count", count)
    gates = [shapes.get(f"model.layers.{i}.self_attn.g_proj.weight", (0,))[0] for i in range(count)]
    return make_family("laguna", "LagunaForCausalLM")(facts, shapes, config) | {
        **experts_of(facts),
        **made,
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gates == heads else "per-element",
        "shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        "mlp_layer_types": _kinds_of_mlp(shapes, config),
        "moe_routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "sliding_window": window_of(facts, shapes, config),
        "layer_types": kinds,
    }


def mimo2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Heads of keys and values by kind of layer; a part of each head rotates."""
    facts.expect("expert_gating_func", SIGMOID)
    count, dim = config["num_hidden_layers"], config["head_dim"]
    kinds = layer_types_of(6)(facts, shapes, config)
    heads = dict(zip(kinds, facts.by_layer("attention.head_count_kv", count), strict=True))
    sinks = {
        kinds[i]
        for i in range(count)
        if f"model.layers.{i}.self_attn.attention_sink_bias" in shapes
    }
    ropes = _by_kind(facts, config)
    for rope in ropes["rope_parameters"].values():
        rope["partial_rotary_factor"] = facts.integer("rope.dimension_count") / dim
    names = ("mimo_v2_flash", "MiMoV2FlashForCausalLM")
    return make_family(*names, sliding_window=window_of)(facts, shapes, config) | {
        **experts_of(facts, count="n_routed_experts"),
        **ropes,
        "num_key_value_heads": heads.get(KINDS[1], heads.get(KINDS[0])),
        "swa_num_key_value_heads": heads.get(KINDS[0], heads.get(KINDS[1])),
        "v_head_dim": facts.integer("attention.value_length"),
        "attention_value_scale": facts.number("attention.value_scale"),
        "add_swa_attention_sink_bias": KINDS[0] in sinks,
        "add_full_attention_sink_bias": KINDS[1] in sinks,
        "layer_types": kinds,
        "mlp_layer_types": _kinds_of_mlp(shapes, config),
        "n_group": facts.integer("expert_group_count", 1),
        "topk_group": facts.integer("expert_group_used_count", 1),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


def minimax_m3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Tensors say which layers have an index; the clamp is llama.cpp's own constant."""
    facts.expect("expert_gating_func", SIGMOID)
    facts.expect("expert_weights_norm", True)
    facts.read("leading_dense_block_count", "expert_shared_count")  # tensors say both
    layers, kinds = range(config["num_hidden_layers"]), _kinds_of_mlp(shapes, config)
    indexed = [f"model.layers.{i}.self_attn.indexer.k_proj.weight" in shapes for i in layers]
    shared = f"model.layers.{kinds.index('sparse')}.mlp.shared_experts.up_proj.weight"
    names = ("minimax_m3_vl_text", "MiniMaxM3SparseForCausalLM")
    return make_family(*names, hidden_act="swigluoai")(facts, shapes, config) | {
        **experts_of(facts, count="num_local_experts", size="intermediate_size"),
        "dense_intermediate_size": facts.integer("feed_forward_length"),
        "shared_intermediate_size": rows_of(shapes, shared),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "rotary_dim": facts.integer("rope.dimension_count"),
        "is_moe_layer": [int(kind == "sparse") for kind in kinds],
        "layer_types": ["minimax_m3_sparse" if one else KINDS[1] for one in indexed],
        "index_n_heads": facts.integer("attention.indexer.head_count"),
        "index_head_dim": facts.integer("attention.indexer.key_length"),
        "index_topk_blocks": facts.integer("attention.indexer.top_k"),
        "index_block_size": facts.integer("attention.indexer.block_size"),
        "index_local_blocks": facts.count("attention.indexer.local_blocks"),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
