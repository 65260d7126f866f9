"""config.json of each family, from GGUF metadata and the shapes of tensors.

Adds what llama.cpp keeps in its code instead of its files: Gemma 3's period of six layers and local
frequency, gpt-oss's alternation and limits, Qwen 3's normalised expert weights.
"""

from collections.abc import Mapping

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ..stored import Array
from .fields import ArchitectureFields
from .gemma import GEMMA, GEMMA2, gemma3, gemma3n, gemma4, gemma_embedding
from .hybrids import (
    delta_net,
    falcon_h1,
    granite_hybrid,
    lfm2,
    nemotron_h,
    ngram_constants,
    qwen4_exp,
)
from .latent import bailing_hybrid, deepseek2, deepseek4, glm5_next, indexed, kimi_linear, mistral4
from .layout import HALVES
from .mixtures import (
    afmoe,
    cohere2_moe,
    exaone_moe,
    hy3,
    laguna,
    mellum,
    mimo2,
    minimax_m3,
    sarvam,
    step,
)
from .names import QUERY_SCALE
from .parts import (
    KINDS,
    SIGMOID,
    SOFTMAX,
    Config,
    FamilyConfig,
    FamilyValue,
    Shapes,
    experts_of,
    has,
    has_biases,
    layer_types_of,
    make_family,
    ministral_ropes,
    multipliers_of,
    norm_eps,
    number_of,
    routing_of,
    rows_in,
    window_of,
)
from .vectors import BERT, NOMIC_BERT, modern_bert


def _halved(facts: ArchitectureFields, shapes: Shapes, config: Config) -> bool:
    facts.read("rope.dimension_sections")
    return facts.has("rope.dimension_sections")


def _llama(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Mistral's files call themselves llama; a window or experts set them apart."""
    window = window_of(facts, shapes, config)
    if facts.count("expert_count"):
        family = make_family("mixtral", "MixtralForCausalLM", sliding_window=window)
        return family(facts, shapes, config) | experts_of(facts, count="num_local_experts", size="")
    if window:
        family = make_family("mistral", "MistralForCausalLM", sliding_window=window)
        return family(facts, shapes, config)
    return make_family("llama", "LlamaForCausalLM")(facts, shapes, config)


def _mistral3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Ministral 3, whose queries grow with their position, and Mistral Small 3."""
    window = window_of(facts, shapes, config)
    if not facts.has("attention.temperature_scale"):
        family = make_family("mistral", "MistralForCausalLM", sliding_window=window)
        return family(facts, shapes, config)
    family = make_family("ministral3", "Ministral3ForCausalLM", sliding_window=window)
    # The logarithm's factor is mscale_all_dim itself here; what divides it is 1 in every model.
    all_dim = facts.number("rope.scaling.yarn_log_multiplier")
    scales = {} if all_dim is None else {"mscale": 1.0, "mscale_all_dim": all_dim}
    return family(facts, shapes, config) | ministral_ropes(facts, config, **scales)


def _phi3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """A window of 0 means no window, as in Phi-4."""
    context = config["max_position_embeddings"]
    original = facts.integer("rope.scaling.original_context_length", context)
    if config["rope_scaling"] is not None:  # transformers computes the factor of queries and keys
        scale = max(context / original, 1.0)
        follows = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        stated = facts.number("rope.scaling.attn_factor", follows)
        if stated is None or not np.isclose(stated, follows, rtol=1e-4):
            raise UnsupportedModelError(
                f"phi3.rope.scaling.attn_factor in {facts.all.where} is {stated}; expected "
                f"{follows:.5f}, which follows from {context} and {original} positions."
            )
    return make_family("phi3", "Phi3ForCausalLM")(facts, shapes, config) | {
        "original_max_position_embeddings": original,
        "sliding_window": window_of(facts, shapes, config),
    }


def _olmo2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    if not facts.count("attention.sliding_window"):
        return make_family("olmo2", "Olmo2ForCausalLM")(facts, shapes, config)
    facts.expect("rope.freq_base_swa", config["rope_theta"])  # scaled where all is seen alone
    windows = {"sliding_window": window_of, "layer_types": layer_types_of(4)}
    return make_family("olmo3", "Olmo3ForCausalLM", **windows)(facts, shapes, config)


def _exaone4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Without a window every layer sees everything and has rope."""
    windowed = facts.count("attention.sliding_window")
    windows = {
        "sliding_window": windowed or None,
        "sliding_window_pattern": 4 if windowed else None,
    }
    types = layer_types_of(4) if windowed else [KINDS[1]] * config["num_hidden_layers"]
    family = make_family("exaone4", "Exaone4ForCausalLM", layer_types=types, **windows)
    return family(facts, shapes, config)


def _granite(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.expect("rope.scaling.finetuned", True)  # else there is no rope
    family = make_family("granite", "GraniteForCausalLM")(facts, shapes, config)
    return family | multipliers_of(facts, config["head_dim"])


def _granite_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    return _granite(facts, shapes, config) | {
        "model_type": "granitemoe",
        "architectures": ["GraniteMoeForCausalLM"],
        **experts_of(facts, count="num_local_experts", size=""),
    }


def _stablelm(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Where a layer has one norm, attention and feed-forward block run beside each other."""
    facts.read("use_parallel_residual")
    return make_family("stablelm", "StableLmForCausalLM")(facts, shapes, config) | {
        "use_parallel_residual": "model.layers.0.post_attention_layernorm.weight" not in shapes,
        "use_qkv_bias": has_biases(shapes),
        "qk_layernorm": False,
    }


def query_scale(facts: ArchitectureFields, factors: Mapping[str, Array]) -> float:
    """Of Muse Glimmer: llama.cpp has it as the weights of a norm; those of keys are 1."""
    by_part: dict[str, list[float]] = {"q": [], "k": []}
    for name, values in factors.items():
        if match := QUERY_SCALE.fullmatch(name):
            by_part[match[1]] += np.unique(values).tolist()
    queries, keys = (set(values) for values in by_part.values())
    if len(queries) != 1 or keys != {1.0}:
        raise UnsupportedModelError(
            f"The norms of queries and keys in {facts.all.where} are no factor; expected one "
            "number for queries, and 1 for keys."
        )
    return round(queries.pop(), 6)


def _apertus_constants(facts: ArchitectureFields) -> dict[str, Array]:
    """The numbers of each layer's activation, which are tensors in transformers."""
    parts = ("alpha_n", "alpha_p", "beta", "eps")
    by_part = {part: facts.all.get(f"xielu.{part}") for part in parts}
    if any(not isinstance(values, np.ndarray) for values in by_part.values()):
        raise CheckpointError(f"{facts.all.where} lacks one of {', '.join(parts)} of xielu.")
    return {
        f"model.layers.{i}.mlp.act_fn.{part}": np.asarray(by_part[part][i], np.float32)
        for part in parts
        for i in range(facts.num_layers)
    }


def _muse(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    return make_family("muse_glimmer_text", "MuseGlimmerForCausalLM")(facts, shapes, config) | {
        "hidden_activation": "silu",
        "output_multiplier": facts.number("logit_scale", 1.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "sliding_window": window_of(facts, shapes, config),
        "layer_types": layer_types_of(4)(facts, shapes, config),
    }


def _no_ropes(facts: ArchitectureFields, shapes: Shapes, config: Config) -> list[int]:
    """llama.cpp's own constant: each fourth layer has none."""
    return [int((index + 1) % 4 != 0) for index in range(config["num_hidden_layers"])]


def _dots1(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.expect("expert_gating_func", SIGMOID)
    window = window_of(facts, shapes, config)
    family = make_family("dots1", "Dots1ForCausalLM", sliding_window=window)
    return family(facts, shapes, config) | routing_of(facts)


def _ernie_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.expect("expert_gating_func", SOFTMAX)
    family = make_family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", use_bias=has_biases(shapes))
    return family(facts, shapes, config) | {
        **experts_of(facts, count="moe_num_experts", per_token="moe_k"),
        "moe_num_shared_experts": facts.count("expert_shared_count"),
        "moe_layer_start_index": facts.count("leading_dense_block_count"),
        "moe_layer_interval": facts.integer("interleave_moe_layer_step", 1),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
    }


def _minimax_m2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.expect("expert_gating_func", SIGMOID)
    return make_family("minimax_m2", "MiniMaxM2ForCausalLM")(facts, shapes, config) | {
        **experts_of(facts, count="num_local_experts", size="intermediate_size"),
        "use_qk_norm": True,
        "rotary_dim": facts.integer("rope.dimension_count"),
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }


def _of_pictures(family: FamilyConfig) -> FamilyConfig:
    """The text of a model that sees: there, all three positions of M-RoPE are the same."""

    def make(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
        facts.read("rope.dimension_sections", "n_deepstack_layers", "deepstack_mapping")
        return family(facts, shapes, config)

    return make


_QWEN2 = make_family("qwen2", "Qwen2ForCausalLM", use_sliding_window=False)
_QWEN3 = make_family("qwen3", "Qwen3ForCausalLM", use_sliding_window=False)


def _qwen3_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    return make_family("qwen3_moe", "Qwen3MoeForCausalLM")(facts, shapes, config) | {
        **experts_of(facts),
        "norm_topk_prob": facts.flag("expert_weights_norm", default=True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gpt_oss(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return make_family("gpt_oss", "GptOssForCausalLM")(facts, shapes, config) | {
        **experts_of(facts, count="num_local_experts", size="intermediate_size"),
        "experts_per_token": facts.integer("expert_used_count"),
        "attention_bias": True,
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": [KINDS[index % 2] for index in range(config["num_hidden_layers"])],
        "swiglu_limit": 7.0,
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _glm4_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    facts.read("rope.dimension_sections")  # rows lie as those of texts do
    fields = make_family("glm4_moe", "Glm4MoeForCausalLM")(facts, shapes, config)
    facts.expect("expert_gating_func", SIGMOID)
    return fields | {
        **routing_of(facts),
        "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in shapes,
    }


_MAVERICK = 128  # experts: the one Llama 4 whose queries and keys are not normed


def _llama4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Chunks, scales and layers without rope are llama.cpp's own constants."""
    router, count = "model.layers.{}.feed_forward.router.weight", config["num_hidden_layers"]
    experts = facts.integer("expert_count")
    facts.read("interleave_moe_layer_step")  # tensors say which layers have experts
    return make_family("llama4_text", "Llama4ForCausalLM")(facts, shapes, config) | {
        **experts_of(facts, count="num_local_experts", size="intermediate_size"),
        "intermediate_size_mlp": facts.integer("feed_forward_length"),
        "moe_layers": [i for i in range(count) if router.format(i) in shapes],
        "no_rope_layers": _no_ropes(facts, shapes, config),
        "use_qk_norm": experts != _MAVERICK,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
    }


def _granite_swa(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """With experts and without; `attention.rope_pattern` says which layers have rope."""
    count = config["num_hidden_layers"]
    has_rope = facts.by_layer_or_none("attention.rope_pattern", count) or [1] * count
    made = make_family("granite_swa", "GraniteSWAForCausalLM")(facts, shapes, config) | {
        **multipliers_of(facts, config["head_dim"]),
        "sliding_window": window_of(facts, shapes, config),
        "layer_types": layer_types_of(4)(facts, shapes, config),
        "layer_rope_theta": [config["rope_theta"] if one else 0 for one in has_rope],
    }
    if not facts.count("expert_count"):
        return made
    shared = shapes.get("model.layers.0.shared_mlp.output_linear.weight", (0, 0))[1]
    return made | {
        "model_type": "granitemoe_swa",
        "architectures": ["GraniteMoeSWAForCausalLM"],
        **experts_of(facts, count="num_local_experts", size=""),
        "shared_intermediate_size": shared,
    }


def _hunyuan_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    shared, size = facts.count("expert_shared_count"), facts.integer("expert_feed_forward_length")
    names = ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM")
    return make_family(*names, use_qk_norm=True)(facts, shapes, config) | {
        **experts_of(facts, per_token="moe_topk"),
        "intermediate_size": size,
        "num_shared_expert": shared,
        "use_mixed_mlp_moe": shared > 0,
    }


_EXPERTS: dict[str, FamilyValue] = {
    "num_experts": lambda facts, shapes, config: facts.integer("expert_count"),
    "num_experts_per_tok": lambda facts, shapes, config: facts.integer("expert_used_count"),
    "norm_topk_prob": lambda facts, shapes, config: facts.flag("expert_weights_norm"),
}
CONSTANTS = {
    "apertus": _apertus_constants,
    "qwen4exp": ngram_constants,
}  # tensors that a file has among its fields
FAMILIES: dict[str, FamilyConfig] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "afmoe": afmoe,
    "apertus": make_family(
        "apertus", "ApertusForCausalLM", hidden_act="xielu", post_norm=False, qk_norm=True
    ),
    "arcee": make_family("arcee", "ArceeForCausalLM", hidden_act="relu2"),
    "chatglm": make_family("glm", "GlmForCausalLM"),
    "cohere2": make_family(
        "cohere2",
        "Cohere2ForCausalLM",
        logit_scale=number_of("logit_scale", 1.0),
        sliding_window=window_of,
        layer_types=layer_types_of(4),
    ),
    "cohere2moe": cohere2_moe,
    "command-r": make_family(
        "cohere",
        "CohereForCausalLM",
        logit_scale=number_of("logit_scale", 1.0),
        use_qk_norm=has("self_attn.q_norm.weight"),
    ),
    "deepseek2": deepseek2,
    "deepseek32": indexed,
    "deepseek4": deepseek4,
    "dots1": _dots1,
    "ernie4_5": make_family(
        "ernie4_5", "Ernie4_5ForCausalLM", use_bias=has("self_attn.q_proj.bias")
    ),
    "ernie4_5-moe": _ernie_moe,
    "exaone4": _exaone4,
    "exaone-moe": exaone_moe,
    "falcon-h1": falcon_h1,
    "bailingmoe2": sarvam,
    "bailingmoe3": bailing_hybrid,
    "bert": BERT,
    "nomic-bert": NOMIC_BERT,
    "modern-bert": modern_bert,
    "gemma": GEMMA,
    "gemma-embedding": gemma_embedding,
    "gemma2": GEMMA2,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "glm-dsa": indexed,
    "glm4": make_family("glm4", "Glm4ForCausalLM", **{HALVES: _halved}),
    "glm4moe": _glm4_moe,
    "glm5-next": glm5_next,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granite_swa": _granite_swa,
    "granitehybrid": granite_hybrid,
    "granitemoe": _granite_moe,
    "hunyuan-dense": make_family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", use_qk_norm=True),
    "hunyuan-moe": _hunyuan_moe,
    "hy_v3": hy3,
    "kimi-linear": kimi_linear,
    "laguna": laguna,
    "lfm2": lfm2,
    "lfm2moe": lfm2,
    "llama4": _llama4,
    "mellum": mellum,
    "mimo2": mimo2,
    "mistral4": mistral4,
    "muse-glimmer": _muse,
    "nemotron": make_family(
        "nemotron", "NemotronForCausalLM", hidden_act="relu2", norm_eps=norm_eps
    ),
    "minimax-m2": _minimax_m2,
    "minimax-m3": minimax_m3,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "olmo2": _olmo2,
    "olmoe": make_family("olmoe", "OlmoeForCausalLM", **_EXPERTS),
    "phi2": make_family(
        "phi", "PhiForCausalLM", hidden_act="gelu_new", intermediate_size=rows_in("mlp.fc1.weight")
    ),
    "phi3": _phi3,
    "qwen2": _QWEN2,
    "qwen2moe": make_family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **_EXPERTS,
        moe_intermediate_size=rows_in("mlp.switch_mlp.gate_proj.weight", 1),
        shared_expert_intermediate_size=rows_in("mlp.shared_expert.gate_proj.weight"),
    ),
    "qwen2vl": _of_pictures(_QWEN2),
    "qwen3": _QWEN3,
    "qwen35": delta_net,
    "qwen35moe": delta_net,
    "qwen4exp": qwen4_exp,
    "qwen3moe": _qwen3_moe,
    "qwen3next": delta_net,
    "qwen3vl": _of_pictures(_QWEN3),
    "qwen3vlmoe": _of_pictures(_qwen3_moe),
    "seed_oss": make_family(
        "seed_oss", "SeedOssForCausalLM", attention_out_bias=has("self_attn.o_proj.bias")
    ),
    "smollm3": make_family(
        "smollm3", "SmolLM3ForCausalLM", no_rope_layers=_no_ropes, use_sliding_window=False
    ),
    "stablelm": _stablelm,
    "step35": step,
    "starcoder2": make_family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=norm_eps,
        use_bias=has("self_attn.q_proj.bias"),
        sliding_window=window_of,
    ),
}
BY_LAYER = (  # heads for K and V differ between layers
    "bailingmoe3", "glm5-next", "kimi-linear", "mimo2", "gemma4", "granitehybrid", "lfm2",
    "lfm2moe", "nemotron_h", "nemotron_h_moe",
)  # fmt: skip
PARTIAL = (  # a part of each head rotates
    "bailingmoe2", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "glm4", "glm4moe", "phi3",
    "minimax-m2", "minimax-m3", "chatglm", "nemotron", "phi2", "stablelm", "laguna",
)  # fmt: skip
