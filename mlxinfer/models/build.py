"""From a config and weights to a decoder. Knows checkpoint names; families say what differs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..layers.activations import ACTIVATIONS, Gated, gated
from ..layers.attention import Attention, HeadsMaker
from ..layers.frequencies import inverse_frequencies
from ..layers.linear import Projection
from ..layers.mlp import MLP
from ..layers.norm import Norm, rms_norm
from ..layers.rope import Rope, make_rope, scale_factor
from ..layers.tree import arrays
from ..metal_kernels.heads import Heads
from .config import ModelConfig
from .decoder import FeedForward, Model, PreNormLayer, SandwichLayer
from .weights import Weights

MakeMLP = Callable[[ModelConfig, Weights, int, str], FeedForward]  # ..., layer index, path


def make_dense_mlp(config: ModelConfig, weights: Weights, index: int, path: str) -> FeedForward:
    """gate_proj, up_proj and down_proj."""
    inner = config.intermediate_size
    gate_up = weights.fused(
        [f"{path}.gate_proj", f"{path}.up_proj"],
        [inner, inner],
        config.hidden_size,
        bias=config.mlp_bias,
    )
    down = weights.linear(f"{path}.down_proj", config.hidden_size, inner, bias=config.mlp_bias)
    return MLP(gate_up, down, activation(config, weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a family has that others do not."""

    qk_norm: bool = False  # over each head, before the rope
    norm_offset: float = 0.0  # Gemma stores its norm weights less one
    sandwich: bool = False  # norms after attention and MLP, too
    sinks: bool = False
    embed_scale: float | None = None
    make_mlp: MakeMLP = make_dense_mlp


def build_decoder(config: ModelConfig, weights: Weights, plan: Plan) -> Model:
    """The model, its weights evaluated layer by layer so that nothing is held twice.

    Raises:
        CheckpointError: a tensor is missing, misshapen or left over.
    """
    dtype = weights.dtype
    tied = config.tie_word_embeddings and weights.same_matrix("lm_head", "model.embed_tokens")
    config = replace(config, tie_word_embeddings=tied)
    specs = list(dict.fromkeys(config.ropes))
    ropes = [make_rope(spec, config.head_dim, dtype) for spec in specs]
    table = weights.embedding(
        "model.embed_tokens",
        (config.vocab_size, config.hidden_size),
        shared=tied,
    )
    layers = []
    for index, spec in enumerate(config.ropes):
        layer = _layer(config, weights, plan, index, ropes[specs.index(spec)])
        mx.eval(list(arrays(layer)))
        layers.append(layer)
    norm = _norm(config, weights, plan, "model.norm", config.hidden_size)
    if tied:
        weights.drop("lm_head.weight", "lm_head.scales", "lm_head.biases")
        lm_head: Projection = table.as_linear()
    else:
        lm_head = weights.linear("lm_head", config.vocab_size, config.hidden_size)
    weights.finish()
    model = Model(
        config,
        embed_tokens=table,
        layers=layers,
        ropes=ropes,
        rope_of_layer=[specs.index(spec) for spec in config.ropes],
        norm=norm,
        lm_head=lm_head,
        activation_dtype=dtype,
        embed_scale=plan.embed_scale,
    )
    mx.eval(model.arrays(), list(arrays(lm_head)))
    return model


def activation(config: ModelConfig, weights: Weights) -> Gated:
    """The gated activation that the config names."""
    if config.activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act is {config.activation!r}; supported are {', '.join(ACTIVATIONS)}."
        )
    return gated(config.activation, weights.dtype)


def _layer(
    config: ModelConfig, weights: Weights, plan: Plan, index: int, rope: Rope
) -> PreNormLayer | SandwichLayer:
    path = f"model.layers.{index}"
    names = ["input_layernorm", "post_attention_layernorm"]
    if plan.sandwich:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms = [_norm(config, weights, plan, f"{path}.{name}", config.hidden_size) for name in names]
    attention = _attention(config, weights, plan, index, rope)
    mlp = plan.make_mlp(config, weights, index, f"{path}.mlp")
    if plan.sandwich:
        return SandwichLayer(norms, attention, mlp)
    return PreNormLayer(norms[0], attention, norms[1], mlp)


def _attention(
    config: ModelConfig, weights: Weights, plan: Plan, index: int, rope: Rope
) -> Attention:
    path = f"model.layers.{index}.self_attn"
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv_proj = weights.fused(
        [f"{path}.{name}_proj" for name in "qkv"],
        [heads * dim, kv_heads * dim, kv_heads * dim],
        config.hidden_size,
        bias=config.qkv_bias,
    )
    norm_weight = _qk_norm_weight(config, weights, plan, path) if plan.qk_norm else None
    return Attention(
        qkv_proj=qkv_proj,
        o_proj=weights.linear(
            f"{path}.o_proj", config.hidden_size, heads * dim, bias=config.o_bias
        ),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=config.attention_scale * scale_factor(config.ropes[index], dim),
        rope=rope,
        qk_norm=None if norm_weight is None else rms_norm(norm_weight, config.rms_norm_eps),
        sinks=weights.take(f"{path}.sinks", (heads,)) if plan.sinks else None,
        make_heads=_heads_maker(config, plan, index, norm_weight),
    )


def _heads_maker(
    config: ModelConfig, plan: Plan, index: int, norm_weight: mx.array | None
) -> HeadsMaker:
    """What norm and rope of a layer are, for the kernel that does both."""
    spec, dim = config.ropes[index], config.head_dim
    whole = spec.dims == dim  # then the attention scale has the factor, see scale_factor

    def make(key_bits: int | None, value_bits: int | None) -> Heads:
        return Heads(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            key_bits=key_bits,
            value_bits=value_bits,
            rotate=key_bits == 4,
            norm_weight=norm_weight,
            norm_eps=config.rms_norm_eps,
            frequencies=mx.array(inverse_frequencies(spec), mx.float32),
            magnitude=1.0 if whole else spec.attention_factor,
        )

    return make


def _norm(config: ModelConfig, weights: Weights, plan: Plan, path: str, dims: int) -> Norm:
    weight = weights.take(f"{path}.weight", (dims,), offset=plan.norm_offset)
    return rms_norm(weight, config.rms_norm_eps)


def _qk_norm_weight(config: ModelConfig, weights: Weights, plan: Plan, path: str) -> mx.array:
    """(H + Hkv, D) for one norm over the heads of Q and K together, each with its own weights."""
    dim = config.head_dim
    parts = [
        mx.broadcast_to(
            weights.take(f"{path}.{name}_norm.weight", (dim,), offset=plan.norm_offset),
            (count, dim),
        )
        for name, count in (("q", config.num_heads), ("k", config.num_kv_heads))
    ]
    return mx.concatenate(parts)
