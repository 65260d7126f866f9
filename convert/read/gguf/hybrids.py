"""config.json of families with recurrent layers, as `families.py` has those of the others."""

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ..stored import Array
from .fields import ArchitectureFields
from .names import NGRAMS
from .parts import (
    SIGMOID,
    Config,
    Shapes,
    experts_of,
    make_family,
    multipliers_of,
    routing_of,
    rows_of,
)


def delta_net(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Qwen3-Next too: as the later models have it, with a matrix for each projection."""
    # In a text all positions are the same; tensors say which layers recur.
    facts.read("rope.dimension_sections", "attention.recurrent_layers")
    layers = range(config["num_hidden_layers"])
    recurs = [f"model.layers.{i}.linear_attn.A_log" in shapes for i in layers]
    values, inner = facts.integer("ssm.time_step_rank"), facts.integer("ssm.inner_size")
    if inner % values:
        raise CheckpointError(
            f"ssm.inner_size in {facts.all.where} is {inner}, which {values} heads do not share."
        )
    fields = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_act": "silu",
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurs],
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": facts.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "attention_bias": any(name.endswith(".q_proj.bias") for name in shapes),
    }
    if facts.architecture == "qwen35":
        return fields | {"intermediate_size": facts.integer("feed_forward_length")}
    shared = shapes.get("model.layers.0.mlp.shared_expert.gate_proj.weight", (0,))[0]
    return fields | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **experts_of(facts),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": facts.flag("expert_weights_norm", default=True),
    }


def qwen4_exp(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """A layer with n-grams at most, whose table is a tensor; gates are llama.cpp's own constant."""
    count = config["num_hidden_layers"]
    ratios = facts.by_layer("attention.compress_ratios", count)
    heads = facts.integer("attention.indexer.head_count")
    indexed = [
        f"model.layers.{i}.self_attn.indexer.q_layernorm.weight" in shapes for i in range(count)
    ]
    if [ratio > 0 for ratio in ratios] != indexed or len({*ratios} - {0}) > 1:
        raise UnsupportedModelError(
            f"attention.compress_ratios in {facts.all.where} is {ratios}; expected one number for "
            f"the layers with an index, {[i for i in range(count) if indexed[i]]}."
        )
    made = delta_net(facts, shapes, config) | {
        "model_type": "qwen4_exp_text",
        "architectures": ["Qwen4ExpForCausalLM"],
        "output_gate_type": "sigmoid",
        "hc_count": facts.integer("hyper_connection.count"),
        "hc_lowrank": facts.integer("hyper_connection.low_rank"),
        "indexer_n_heads": heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": facts.integer("attention.indexer.key_length"),
        "indexer_budget": facts.integer("attention.indexer.top_k"),
        "indexer_compress_ratio": max(ratios),
        "ple_layer_ids": [],
    }
    facts.read("ple.image_token_id")  # pictures are not read
    if not facts.has("ple.layers"):
        return made
    ngram_constants(facts)  # they are read again with the tensors
    (layer,) = _integers(facts, "ple.layers")
    ngrams, per_length = facts.integer("ple.ngram_size"), facts.integer("ple.heads_per_ngram")
    width = facts.integer("embedding_length_per_layer_input")
    return made | {
        "ple_layer_ids": [int(layer) + 1],
        "ngram_size": ngrams,
        "heads_per_ngram": per_length,
        "ple_embed_dim": width * per_length * (ngrams - 1),
        "ple_conv_kernel_size": facts.integer("ple.conv_kernel"),
        "eos_token_id": facts.count("ple.eos_token_id"),  # where n-grams begin anew
    }


def ngram_constants(facts: ArchitectureFields) -> dict[str, Array]:
    """How tokens become rows of the table, which are tensors in transformers."""
    if not facts.has("ple.layers"):
        return {}
    (layer,) = _integers(facts, "ple.layers")
    names = {
        "layer_multipliers": "layer_multipliers",
        "ngram_heads_offsets": "head_offsets",
        "ngram_heads_vocab_sizes": "head_vocab_sizes",
    }
    path = NGRAMS.format(layer)
    return {f"{path}.{ours}": _integers(facts, f"ple.{key}") for ours, key in names.items()}


def _integers(facts: ArchitectureFields, key: str) -> Array:
    name = facts.name(key)
    values = facts.all.get(name)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or not len(values):
        raise CheckpointError(f"{name} in {facts.all.where} is no list of whole numbers.")
    if key == "ple.layers" and len(values) > 1:
        raise UnsupportedModelError(f"{name} in {facts.all.where} has several; supported is one.")
    return values.astype(np.int64)


def lfm2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Layers without heads for K and V are convolutions."""
    kv_heads = facts.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    first = "model.layers.{}.conv.in_proj.bias"
    fields = {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": facts.integer("shortconv.l_cache"),
        "conv_bias": any(first.format(i) in shapes for i in range(len(kv_heads))),
        "norm_eps": config["rms_norm_eps"],
        "intermediate_size": facts.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }
    if facts.architecture == "lfm2":
        return fields
    facts.expect("expert_gating_func", SIGMOID)
    return fields | {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        **experts_of(facts),
        "num_dense_layers": facts.count("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".expert_bias") for name in shapes),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


def granite_hybrid(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Layers without heads for K and V are Mamba-2."""
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    kv_heads = facts.by_layer("attention.head_count_kv", count)
    heads, inner = facts.integer("ssm.time_step_rank"), facts.integer("ssm.inner_size")
    if inner % heads or inner % hidden:
        raise CheckpointError(
            f"ssm.inner_size in {facts.all.where} is {inner}; expected a multiple of {heads} heads "
            f"and of {hidden}."
        )
    places = ("conv1d.bias", "in_proj.bias")
    biased = [any(name.endswith(f".mamba.{place}") for name in shapes) for place in places]
    made = make_family("granitemoehybrid", "GraniteMoeHybridForCausalLM")(facts, shapes, config) | {
        **multipliers_of(facts, config["head_dim"]),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["attention" if one else "mamba" for one in kv_heads],
        "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned") else "nope",
        "shared_intermediate_size": rows_of(shapes, "model.layers.0.mlp.gate_proj.weight"),
        "attention_bias": any(name.endswith(".q_proj.bias") for name in shapes),
        "num_local_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "mamba_n_heads": heads,
        "mamba_n_groups": facts.integer("ssm.group_count"),
        "mamba_d_state": facts.integer("ssm.state_size"),
        "mamba_d_head": inner // heads,
        "mamba_d_conv": facts.integer("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": biased[0],
        "mamba_proj_bias": biased[1],
    }
    return made


def _mamba(facts: ArchitectureFields, names: tuple[str, ...]) -> Config:
    """Sizes of Mamba-2 under a family's keys: heads, a head's, groups, state and convolution."""
    heads, inner = facts.integer("ssm.time_step_rank"), facts.integer("ssm.inner_size")
    sizes = (heads, inner // heads, facts.integer("ssm.group_count"))
    more = (facts.integer("ssm.state_size"), facts.integer("ssm.conv_kernel"))
    return dict(zip(names, (*sizes, *more), strict=True))


def falcon_h1(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """The converter puts all multipliers into the matrices."""
    names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return make_family("falcon_h1", "FalconH1ForCausalLM")(facts, shapes, config) | {
        **_mamba(facts, names),
        "mamba_d_ssm": facts.integer("ssm.inner_size"),
        "mamba_rms_norm": "model.layers.0.mamba.norm.weight" in shapes,
        "mamba_conv_bias": "model.layers.0.mamba.conv1d.bias" in shapes,
        "mamba_proj_bias": "model.layers.0.mamba.in_proj.bias" in shapes,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


_MULTIPLIERS = (  # of Falcon-H1
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier",
    "key_multiplier", "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def nemotron_h(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    count = config["num_hidden_layers"]
    marks = {"in_proj": "M", "q_proj": "*", "gate": "E"}
    blocks = [
        next((m for k, m in marks.items() if f"model.layers.{i}.mixer.{k}.weight" in shapes), "-")
        for i in range(count)
    ]
    kv_heads = facts.by_layer("attention.head_count_kv", count)
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    facts.read("rope.dimension_count")  # there is no rope
    facts.read(*(f"expert_{name}" for name in ("count", "used_count", "shared_count")))
    facts.read("expert_weights_scale", "expert_weights_norm")
    dense = f"model.layers.{blocks.index('-')}" if "-" in blocks else ""
    made = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **_mamba(facts, names),
        "hybrid_override_pattern": "".join(blocks),
        "intermediate_size": rows_of(shapes, f"{dense}.mixer.up_proj.weight") if dense else 1,
        "layer_norm_epsilon": config.get("layer_norm_eps", config["rms_norm_eps"]),
        "num_attention_heads": max(facts.by_layer("attention.head_count", count)),
        "num_key_value_heads": max(kv_heads),
        "use_conv_bias": any(name.endswith(".conv1d.bias") for name in shapes),
        "use_bias": any(name.endswith(".in_proj.bias") for name in shapes),
        "mlp_bias": any(name.endswith(".mixer.up_proj.bias") for name in shapes),
        "attention_bias": any(name.endswith(".q_proj.bias") for name in shapes),
    }
    if "E" not in blocks:
        return made
    shared = f"model.layers.{blocks.index('E')}.mixer.shared_experts.up_proj.weight"
    latent = facts.integer("moe_latent_size") if facts.has("moe_latent_size") else None
    return made | {
        **routing_of(facts),
        "moe_shared_expert_intermediate_size": rows_of(shapes, shared),
        "moe_latent_size": latent,
    }
