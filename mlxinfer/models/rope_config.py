"""How a config states positions: which layers have a window, and how their heads turn.

Both spellings of rotary embeddings are read.
Version 4: `rope_theta`, `rope_scaling: {type | rope_type, factor, ...}`, `partial_rotary_factor`,
and for Gemma 3 `rope_local_base_freq`. Version 5: `rope_parameters: {rope_type, rope_theta, ...}`,
or one such object per layer type.
"""

import math
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from ..layers.rope import RopeSpec, yarn_attention_factor
from .jsonfields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
_KINDS = {
    "default": "default",
    "mrope": "default",  # for text alone, all three of its axes are the position
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "proportional",  # a part of the pairs turns, at the speeds of whole heads
    "su": "longrope",  # as Microsoft first called it
}


def read_layer_types(fields: Fields, num_layers: int) -> list[str]:
    """FULL or SLIDING for each layer, from a stated list or period; else a window is everywhere.

    Raises:
        CheckpointError: a list of another length, or of other words.
    """
    if fields.get("sliding_window") is None:
        return [FULL] * num_layers
    stated = fields.items("layer_types")
    if stated is not None:
        if len(stated) != num_layers or not all(kind in (FULL, SLIDING) for kind in stated):
            raise CheckpointError(
                f"layer_types in {fields.where} must be {num_layers} times {FULL!r} or {SLIDING!r}."
            )
        return stated
    if fields.get("sliding_window_pattern") is None:
        return [SLIDING] * num_layers
    period = fields.integer("_sliding_window_pattern", "sliding_window_pattern", high=2**20)
    return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]


def read_rope(config: Fields, layer_type: str, *, head_dim: int) -> RopeSpec:
    """The rope of the layers of one type ("full_attention" | "sliding_attention").

    Raises:
        CheckpointError: values that make no sense.
        UnsupportedModelError: a kind of scaling that is not known here.
    """
    stated = _stated(config, layer_type)
    kind = stated.text("rope_type", "type", default="default")
    alpha = stated.number("alpha", above=0.0, high=1e9, default=None)
    raised = kind == "dynamic" and alpha is not None and head_dim > 2  # Hunyuan: for good
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
            f"{stated.where} turns {dims} of {head_dim} dimensions; expected an even number."
        )
    theta = stated.number("rope_theta", above=1.0)
    if raised:
        return RopeSpec(dims=dims, theta=theta * alpha ** (head_dim / (head_dim - 2)))
    base = RopeSpec(dims=dims, theta=theta, kind=_KINDS[kind])
    if base.kind == "default":
        return base
    return (_long if base.kind == "longrope" else _scaled)(base, stated, config)


def _stated(config: Fields, layer_type: str) -> Fields:
    """One flat object with rope_theta in it, whatever the spelling."""
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
        values |= _present(chosen)
    return Fields(values, chosen.where if chosen is not None else config.where)


def _one_of(new: Fields | None, old: Fields | None) -> Fields | None:
    """The spelling that counts where both are there.

    A `rope_scaling` beside default `rope_parameters` counts: users add it to switch scaling on.

    Raises:
        CheckpointError: they scale in two ways.
    """
    if new is None or old is None:
        return old if new is None else new
    kinds = [stated.text("rope_type", "type", default="default") for stated in (new, old)]
    if kinds[1] == "default":
        return new
    if kinds[0] == "default":
        return Fields({**new.values, **_present(old), "rope_type": kinds[1]}, old.where)
    stated, repeated = _present(new), _present(old)
    both = stated.keys() & repeated.keys() - {"type", "rope_type"}
    if kinds[0] != kinds[1] or any(stated[key] != repeated[key] for key in both):
        raise CheckpointError(
            f"{new.where} and {old.where} scale positions in two ways; leave one of them out."
        )
    return Fields({**repeated, **stated}, new.where)


def _present(stated: Fields) -> dict[str, Any]:
    return {key: value for key, value in stated.values.items() if value is not None}


def _proportional(stated: Fields, head_dim: int, dims: int) -> RopeSpec:
    if head_dim % 2:
        raise CheckpointError(f"{stated.where} turns heads of {head_dim}; expected an even number.")
    return RopeSpec(
        dims=head_dim,
        theta=stated.number("rope_theta", above=1.0),
        kind="proportional",
        factor=stated.number("factor", low=1e-3, high=1e6, default=1.0),
        num_still=head_dim // 2 - dims // 2,
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
