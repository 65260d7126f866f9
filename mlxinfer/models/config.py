"""config.json, normalised: one frozen ModelConfig for every family and spelling.

A family states its defaults and reads what only it has; see family.py. Both spellings of rotary
embeddings are read. Version 4: `rope_theta`, `rope_scaling: {type | rope_type, factor, ...}`,
`partial_rotary_factor`, and for Gemma 3 `rope_local_base_freq`. Version 5: `rope_parameters:
{rope_type, rope_theta, ...}`, or one such object per layer type.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..cache_specs import CacheSpec, IndexSpec, KVSpec, LatentSpec, StateSpec
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.rope import RopeSpec, yarn_attention_factor
from . import registry
from .jsonfields import Fields, read_json
from .quantization import Quantization, read_quantization
from .registry import text_config
from .weights.share import Share, largest_group

_COMMON = {
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}


_SEES_AHEAD, _SOFT_CAP = "use_bidirectional_attention", "attn_logit_softcapping"
# For these null means the family's default, as in transformers. For windows and caps it means that
# there is none, and for sizes of heads that they follow from others.
_NEVER_NULL = ("rope_theta", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor")
# Families that read these have a default for them; others compute without them, whatever is stated.
_OF_FEW = ("final_logit_softcapping", "query_pre_attn_scalar")

NOTHING = StateSpec(())  # what a layer without a cache keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The settings of a decoder. Per-layer tuples have `num_layers` entries."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # tokens
    eos_token_ids: tuple[int, ...]
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # tokens a layer sees, itself included; None: all
    ropes: tuple[RopeSpec | None, ...]  # None: a layer without positions
    chunked: bool = False  # windows are chunks, see `KVSpec`
    bidirectional: bool = False  # tokens see those after them too, as many as before
    without_lm_head: bool = False  # without an output projection: hidden states are all it gives
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    final_softcap: float | None = None
    score_softcap: float | None = None  # of attention
    logit_scale: float | None = None  # multiplies the logits; None: 1
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[bool, ...] = ()  # whether a layer's MLP is a mixture of experts
    query_heads: tuple[int, ...] = ()  # by layer; empty: num_heads everywhere
    heads: tuple[tuple[int, int], ...] = ()  # num_kv_heads and head_dim by layer; empty: as above
    value_dim: int = 0  # numbers of a head's value; 0: the number of its key
    rope_dims: tuple[int, ...] = ()  # by layer, see `KVSpec`; empty: 0 everywhere
    sees_spans: tuple[bool, ...] = ()  # by layer, see `KVSpec`; empty: no layer does
    latent: LatentSpec | None = None  # of latent attention; None: keys and values are kept
    # By layer, what it keeps in 16 bits beside keys and values; empty: no layer does.
    extra_specs: tuple[IndexSpec | None, ...] = ()
    # By layer, whether it sees what an earlier one chooses, or keeps nothing; empty: none does.
    without_index: tuple[bool, ...] = ()
    without_cache: tuple[bool, ...] = ()
    states: tuple[StateSpec | None, ...] = ()  # of recurrent layers; None: an attention layer
    blocks: tuple[str, ...] = ()  # what each layer is, where it is one block only
    quantization: Quantization | None = None
    dtype: str | None = None  # as the config states it; the tensors themselves decide
    first_layer: int = 0  # of those that `fields` describes, where this is some of them
    fields: Fields = field(repr=False, compare=False)  # for what only one family reads

    @property
    def definition(self) -> str:
        return "native"

    @property
    def definition_version(self) -> str:
        """Empty: the definition is part of this library."""
        return ""

    @property
    def verdict(self) -> str:
        """The check of `zoo.compared`, for a family."""
        return "native"

    @property
    def compared(self) -> str:
        """Every family has tests against recorded logits. `show` reads it of each config."""
        return "it agrees with transformers"

    @property
    def alone_because(self) -> None:
        """Families run batched."""
        return None

    def cache_spec(self, index: int) -> CacheSpec:
        if self.without_cache[index : index + 1] == (True,):
            return NOTHING
        if self.states and (state := self.states[index]) is not None:
            return state
        if self.latent is not None:
            has_index = self.without_index[index : index + 1] != (True,)
            return self.latent if has_index else replace(self.latent, index_dim=0)
        kv_heads, dim = self.heads_of(index)
        window = self.windows[index]
        return KVSpec(
            kv_heads,
            dim,
            self.value_dim or dim,
            window,
            chunked=self.chunked and window is not None,
            rope_dims=self.rope_dims[index] if self.rope_dims else 0,
            sees_spans=bool(self.sees_spans) and self.sees_spans[index],
        )

    def listed(self, key: str, index: int) -> Any:
        """The item of a layer in a list of config.json, unchecked; None: there is none."""
        stated, place = self.fields.items(key) or (), self.first_layer + index
        return stated[place] if place < len(stated) else None

    def num_heads_of(self, index: int) -> int:
        return self.query_heads[index] if self.query_heads else self.num_heads

    def heads_of(self, index: int) -> tuple[int, int]:
        return self.heads[index] if self.heads else (self.num_kv_heads, self.head_dim)


def load_config(folder: Path, share: Share | None = None) -> ModelConfig:
    raw = read_json(folder / "config.json", infinite=True)
    generation = folder / "generation_config.json"
    return normalise(raw, read_json(generation) if generation.is_file() else {}, share)


def normalise(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, share: Share | None = None
) -> ModelConfig:
    """A ModelConfig from the contents of config.json, as transformers 4 or 5 or mlx-lm write it.

    Args:
        share: of the rank that has the described part of the model; None: all of it.
    """
    top = Fields(raw, "config.json")
    text = text_config(top)
    family = registry.family(text.text("model_type"))
    fields = _completed(family.language_model(text), family)
    model_type = fields.text("model_type")
    _check_features(fields, family)
    quantization = read_quantization(top)
    if share is not None:
        fields = share.fields(fields, model_type, largest_group(quantization))
    vocab_size = fields.integer("vocab_size", high=2**24)
    num_layers = fields.integer("num_hidden_layers", high=2000)
    heads = _heads(family, fields, 1 if share is None else share.size)
    qkv_bias, o_bias = (bool(k) and fields.boolean(k, default=False) for k in family.biases)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        num_layers=num_layers,
        eos_token_ids=eos_token_ids(raw, fields, generation or {}, vocab_size),
        tie_word_embeddings=_tied(raw, fields),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        quantization=quantization,
        fields=fields,
        **_block_settings(family, fields),
        **heads,
        **_positions(family, fields, num_layers, heads["head_dim"]),
        **_experts(fields, num_layers),
    )
    configured: ModelConfig = family.configure(config)
    return configured


def _block_settings(family: Any, fields: Fields) -> dict[str, Any]:
    return {
        "hidden_size": fields.integer("hidden_size", high=2**20),
        "intermediate_size": fields.integer("intermediate_size", high=2**22),
        "rms_norm_eps": fields.number("rms_norm_eps", low=0.0, high=1.0),
        "activation": fields.text("hidden_activation", "hidden_act"),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "dtype": fields.text("dtype", "torch_dtype", default=None),
        "bidirectional": fields.boolean(_SEES_AHEAD, default=False),
        "final_softcap": fields.number("final_logit_softcapping", above=0.0, default=None),
        "score_softcap": fields.number(_SOFT_CAP, above=0.0, default=None)
        if _SOFT_CAP in family.computed
        else None,
    }


def _completed(fields: Fields, family: Any) -> Fields:
    """The config with the family's defaults for keys that it leaves out or should not state."""
    assumed = {**_COMMON, **family.defaults}
    if fields.get("rope_parameters") is not None:
        assumed.pop("rope_scaling", None)
    unsaid = {key for key in _NEVER_NULL if key in family.defaults and fields.get(key) is None}
    silent = unsaid.union(family.ignored, (key for key in _OF_FEW if key not in family.defaults))
    stated = {key: value for key, value in fields.values.items() if key not in silent}
    return Fields({**assumed, **stated}, fields.where)


def _heads(family: Any, fields: Fields, num_ranks: int) -> dict[str, Any]:
    """Sizes of the attention heads on one of `num_ranks` ranks, and the scale of the scores."""
    num_heads = fields.integer("num_attention_heads", high=2**14)
    num_kv_heads = fields.integer("num_key_value_heads", high=2**14, default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads is {num_heads}, which num_key_value_heads, {num_kv_heads}, "
            "does not divide."
        )
    head_dim = family.head_dim(fields, num_heads * num_ranks)
    query_scalar = fields.number("query_pre_attn_scalar", above=0.0, default=float(head_dim))
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "attention_scale": query_scalar**-0.5,
    }


def _positions(family: Any, fields: Fields, num_layers: int, head_dim: int) -> dict[str, Any]:
    layer_types = family.layer_types(fields, num_layers)
    window = fields.integer("sliding_window", default=None) if SLIDING in layer_types else None
    ropes = family.rope_specs(fields, layer_types, head_dim)
    return {
        "windows": tuple(window if kind == SLIDING else None for kind in layer_types),
        "ropes": ropes,
        "max_context": _max_context(fields, next((r for r in reversed(ropes) if r), None)),
    }


def _tied(raw: Mapping[str, Any], fields: Fields) -> bool:
    """transformers writes the key beside, not inside, the text_config of a multimodal model."""
    inner = fields.boolean("tie_word_embeddings", default=False)
    return Fields(raw, "config.json").boolean("tie_word_embeddings", default=inner)


def _max_context(fields: Fields, rope: RopeSpec | None) -> int:
    """YaRN configs may state the context before stretching; the others state it after."""
    stated = fields.integer("max_position_embeddings")
    stretched = 0
    if rope is not None and rope.kind == "yarn":
        stretched = int(rope.original_context * rope.factor)
    return min(max(stated, stretched), 2**31 - 1)


def eos_token_ids(
    raw: Mapping[str, Any], fields: Fields, generation: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """Tokens that end an answer, from wherever they are stated."""
    ids: dict[int, None] = {}  # a set that keeps the order
    for values in (generation, raw, fields.values):
        stated = values.get("eos_token_id")
        for token_id in stated if isinstance(stated, list) else [stated]:
            if token_id is None:
                continue
            if type(token_id) is not int:
                raise CheckpointError(
                    f"eos_token_id holds {str(token_id)[:60]!r}; expected token ids."
                )
            if 0 <= token_id < vocab_size:  # others, such as -1, have no logit
                ids[token_id] = None
    return tuple(ids)


def _experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    if fields.get("num_experts", "num_local_experts") is None:
        return {}
    num_experts = fields.integer("num_local_experts", "num_experts", high=2**16)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.items("mlp_only_layers") or []
    return {
        "num_experts": num_experts,
        "experts_per_token": fields.integer(
            "num_experts_per_tok", "experts_per_token", high=num_experts
        ),
        "moe_intermediate_size": fields.integer(
            "moe_intermediate_size", "intermediate_size", high=2**22
        ),
        "norm_topk_prob": fields.boolean("norm_topk_prob", default=False),
        "sparse_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    }


def _check_features(fields: Fields, family: Any) -> None:
    for key in (_SEES_AHEAD, _SOFT_CAP):
        if key not in family.computed and fields.get(key) not in (None, False):
            kind = str(fields.get("model_type"))[:60]
            raise UnsupportedModelError(
                f"{key} is set in {fields.where}, which {kind!r} is computed without here, so that "
                f"answers would be others; {kind!r} models that do not set it run."
            )


FULL, SLIDING = "full_attention", "sliding_attention"
_KINDS = {
    "default": "default",
    "mrope": "default",  # for text alone, all three of its axes are the position
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "deepseek_yarn": "yarn",  # as Sarvam calls it
    "longrope": "longrope",
    "proportional": "proportional",  # a part of the pairs rotates, at the speeds of whole heads
    "su": "longrope",  # as Microsoft first called it
}


def read_layer_types(fields: Fields, num_layers: int) -> list[str]:
    """FULL or SLIDING for each layer, from a stated list or period; else a window is everywhere.

    A list may go on with the layers that predict further ahead, as that of EXAONE 4.5.
    """
    if fields.get("sliding_window") is None:
        return [FULL] * num_layers
    further = fields.integer("num_nextn_predict_layers", low=0, default=1)
    known = (FULL, SLIDING)
    stated = fields.by_layer("layer_types", count=num_layers, known=known, further=further)
    if stated is not None:
        return stated
    if fields.get("sliding_window_pattern") is None:
        return [SLIDING] * num_layers
    period = fields.integer("_sliding_window_pattern", "sliding_window_pattern", high=2**20)
    return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]


def read_rope(config: Fields, layer_type: str, *, head_dim: int) -> RopeSpec:
    """The rope of the layers of one type ("full_attention" | "sliding_attention")."""
    stated = _stated(config, layer_type)
    kind = stated.text("rope_type", "type", default="default")
    alpha = stated.number("alpha", above=0.0, high=1e9, default=None)
    # Hunyuan: for good
    raised = kind in ("dynamic", "xdrope") and alpha is not None and head_dim > 2
    if kind not in _KINDS and not raised:
        raise UnsupportedModelError(
            f"rope_type in {stated.where} is {kind!r}; supported are {', '.join(_KINDS)}."
        )
    partial = stated.number("partial_rotary_factor", above=0.0, high=1.0, default=1.0)
    if stated.get("long_factor") is not None:
        kind = "longrope"  # which old configs of Phi 3 call yarn
    dims = int(head_dim * partial)
    if kind == "proportional":
        return _proportional(stated, head_dim, dims)
    if dims < 2 or dims % 2:
        raise CheckpointError(
            f"{stated.where} rotates {dims} of {head_dim} dimensions; expected an even number."
        )
    theta = stated.number("rope_theta", above=1.0)
    if raised:
        return RopeSpec(dims=dims, theta=theta * alpha ** (head_dim / (head_dim - 2)))
    base = RopeSpec(dims=dims, theta=theta, kind=_KINDS[kind])
    if base.kind == "longrope":
        return _long(base, stated, config)
    scaled = base if base.kind == "default" else _scaled(base, stated, config)
    return _sectioned(scaled, stated, config)


def with_layer_thetas(
    fields: Fields, specs: tuple[RopeSpec | None, ...]
) -> tuple[RopeSpec | None, ...]:
    """Each layer's rope with the base that `layer_rope_theta` states for it; 0: no positions."""
    stated = fields.items("layer_rope_theta")
    if stated is None:
        return specs
    if len(stated) != len(specs):
        raise CheckpointError(f"layer_rope_theta in {fields.where} must have {len(specs)} entries.")
    pairs = zip(specs, stated, strict=True)
    return tuple(spec and replace(spec, theta=float(t)) if t else None for spec, t in pairs)


def _sectioned(spec: RopeSpec, stated: Fields, config: Fields) -> RopeSpec:
    """The rope with the sections of M-RoPE, where they are stated; a family may say the order."""
    sections = stated.items("mrope_section")
    if sections is None:
        return spec
    in_turn = config.boolean("mrope_interleaved", default=False)
    interleaved = stated.boolean("mrope_interleaved", default=in_turn)
    whole = len(sections) == 3 and all(type(count) is int and count >= 0 for count in sections)
    if not whole or sum(sections) != spec.dims // 2:
        raise CheckpointError(
            f"mrope_section in {stated.where} is {sections}; expected three numbers of pairs, "
            f"{spec.dims // 2} in all."
        )
    return replace(spec, sections=tuple(sections), interleaved=interleaved)


def _stated(config: Fields, layer_type: str) -> Fields:
    new = config.fields("rope_parameters")
    if new is not None and isinstance(new.get(layer_type), dict):
        new = new.fields(layer_type)
    old = config.fields("rope_scaling")
    local = config.get("rope_local_base_freq")
    theta = config.get("rope_theta")
    if layer_type == "sliding_attention" and local is not None:
        old, theta = None, local  # Gemma 3 stretches its full-attention layers only
    chosen = _one_of(new, old)
    values = {"rope_theta": theta, "partial_rotary_factor": config.get("partial_rotary_factor")}
    if chosen is not None:
        values |= chosen.present
    return Fields(values, chosen.where if chosen is not None else config.where)


def _one_of(new: Fields | None, old: Fields | None) -> Fields | None:
    """The spelling that counts where both are there.

    A `rope_scaling` beside default `rope_parameters` counts: users add it to switch scaling on.
    """
    if new is None or old is None:
        return old if new is None else new
    kinds = [stated.text("rope_type", "type", default="default") for stated in (new, old)]
    if kinds[1] == "default":
        return new
    if kinds[0] == "default":
        return Fields({**new.values, **old.present, "rope_type": kinds[1]}, old.where)
    stated, repeated = new.present, old.present
    shared = stated.keys() & repeated.keys() - {"type", "rope_type"}
    if kinds[0] != kinds[1] or any(stated[key] != repeated[key] for key in shared):
        raise CheckpointError(
            f"{new.where} and {old.where} scale positions in two ways; leave one of them out."
        )
    return Fields({**repeated, **stated}, new.where)


def _proportional(stated: Fields, head_dim: int, dims: int) -> RopeSpec:
    if head_dim % 2:
        raise CheckpointError(
            f"{stated.where} rotates heads of {head_dim}; expected an even number."
        )
    return RopeSpec(
        dims=head_dim,
        theta=stated.number("rope_theta", above=1.0),
        kind="proportional",
        factor=stated.number("factor", low=1e-3, high=1e6, default=1.0),
        num_unrotated=head_dim // 2 - dims // 2,
    )


def _original_context(stated: Fields, config: Fields) -> int:
    """Tokens the model was first trained with, from the rope's own object or from the config."""
    original = stated.get("original_max_position_embeddings")
    source = stated if original is not None else config
    return source.integer("original_max_position_embeddings", "max_position_embeddings")


def _long(base: RopeSpec, stated: Fields, config: Fields) -> RopeSpec:
    """LongRoPE: one factor for each pair, for sequences within the original context and beyond.

    Of two original contexts the one outside of the rope's own object counts, as in transformers.
    """
    context = config.integer("original_max_position_embeddings", default=None)
    context = _original_context(stated, config) if context is None else context
    full = config.integer("max_position_embeddings")
    factor = stated.number("factor", low=1e-3, high=1e6, default=full / context)
    inferred = math.sqrt(1 + math.log(factor) / math.log(max(context, 2))) if factor > 1 else 1.0
    long, short = (
        replace(
            base,
            factor=factor,
            original_context=context,
            pair_factors=_pair_factors(stated, key, base.dims // 2),
            attention_factor=stated.number("attention_factor", above=0.0, default=inferred),
        )
        for key in ("long_factor", "short_factor")
    )
    return replace(short, long=long)


def _pair_factors(stated: Fields, key: str, count: int) -> tuple[float, ...]:
    listed = stated.items(key) or []
    numbers = [value for value in listed if type(value) in (int, float) and 1e-6 < value < 1e6]
    if len(listed) != count or len(numbers) != count:
        raise CheckpointError(
            f"{key} in {stated.where} must be a list of {count} positive numbers."
        )
    return tuple(map(float, numbers))


def _scaled(base: RopeSpec, stated: Fields, config: Fields) -> RopeSpec:
    context = _original_context(stated, config)
    factor = stated.number("factor", low=1e-3, high=1e6)
    extra: dict[str, float | bool] = {}
    if base.kind == "llama3":
        extra["low_freq_factor"] = stated.number("low_freq_factor", above=0.0, default=1.0)
        extra["high_freq_factor"] = stated.number(
            "high_freq_factor", above=extra["low_freq_factor"], default=4.0
        )
    if base.kind == "yarn":
        extra = _yarn_extra(stated, factor)
    return RopeSpec(
        dims=base.dims,
        theta=base.theta,
        kind=base.kind,
        factor=factor,
        original_context=context,
        **extra,  # type: ignore[arg-type]
    )


def _yarn_extra(stated: Fields, factor: float) -> dict[str, float | bool]:
    mscale = stated.number("mscale", low=0.0, high=1e3, default=None)
    all_dims = stated.number("mscale_all_dim", low=0.0, high=1e3, default=None)
    inferred = yarn_attention_factor(factor, mscale, all_dims)
    return {
        "beta_fast": stated.number("beta_fast", above=0.0, default=32.0),
        "beta_slow": stated.number("beta_slow", above=0.0, default=1.0),
        "truncate": stated.boolean("truncate", default=True),
        "attention_factor": stated.number("attention_factor", above=0.0, default=inferred),
    }
