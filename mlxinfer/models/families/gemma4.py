"""Gemma 4: the dense models and the mixture of experts, alone or inside a multimodal checkpoint.

Layers that see everything have larger heads, may have fewer for K and V, and may take their keys,
before the norm, for values too. Of such a key only the numbers that rotate with its position differ
from those of the value, once the factors of its norm went to the queries: the cache keeps the
others once. The E models have per-layer embeddings, and last layers that read the keys and values
of earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.attention import LayerMixer
from ...layers.linear import Projection
from ...layers.mlp import MLP, FeedForward
from ...layers.moe import ExpertChoice, MoE
from ...layers.norm import Join, Norm, RMSNorm
from ...layers.rope import RopeSpec
from ...layers.step import Layer, Passed, Step
from ...metal_kernels.routing import Routing
from ...metal_kernels.variants import KernelUse, ModelForm, kernels_of
from ..config import FULL, SLIDING, ModelConfig
from ..decoder import Entry
from ..family import Family, HeadNorms, root_of_width
from ..jsonfields import Fields
from ..stage import BetweenStages
from ..weights.matrix import fused
from .gemma import SPANS, language_fields, sees_pictures
from .gemma_e import (
    FROM_ELSEWHERE,
    PerLayerGate,
    between_stages,
    per_layer_gate,
    per_layer_inputs,
    shared,
    shared_or_own,
)

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(slots=True, eq=False)
class NormedMLP:
    """mlp(norm(x))."""

    norm: Norm
    mlp: MLP

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return self.mlp.kernels(model)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.mlp(self.norm(x), residual)


class ParallelExperts:
    """An MLP and a mixture of experts side by side, each between norms of its own.

    Args:
        dense: the MLP with its norm before it.
        router_norm, router: (T, hidden) -> logits (T, E).
        norms: behind the MLP, before the experts and behind them.
    """

    __slots__ = ("dense", "experts", "norms", "router", "router_norm")

    def __init__(
        self,
        dense: NormedMLP,
        *,
        router_norm: Norm,
        router: Projection,
        experts: MoE,
        norms: Sequence[Norm],
    ) -> None:
        self.dense = dense
        self.router_norm = router_norm
        self.router = router
        self.experts = experts
        self.norms = tuple(norms)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, self.dense, self.experts)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        behind_dense, before, behind = self.norms
        logits = self.router(self.router_norm(x))
        y = behind_dense(self.dense(x)) + behind(self.experts.mix(before(x), logits))
        return y if residual is None else residual + y


class ScaledLayer(Layer):
    """A sandwich layer with a scaled output; the second block has its own norms before it.

    Args:
        norms: before and behind the mixer, behind the second block.
        scalar: (1,) multiplies the output.
        gate: adds what the layer makes of its per-layer input; None: there is none.
    """

    __slots__ = ("before", "gate", "joins", "mixer", "mlp", "scalar")

    def __init__(
        self,
        norms: Sequence[Norm],
        mixer: LayerMixer,
        mlp: FeedForward,
        scalar: mx.array,
        gate: PerLayerGate | None = None,
    ) -> None:
        self.before, *behind = norms
        self.joins = [Join(norm, None) for norm in behind]
        self.mixer = mixer
        self.mlp = mlp
        self.scalar = scalar
        self.gate = gate

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> (T, hidden)."""
        to_mlp, onward = self.joins
        normed = self.before(x)
        x = step.narrow(x) if step.narrows else x
        x, _ = to_mlp(x, partial(self.mixer, normed, step))
        x, _ = onward(x, partial(self.mlp, x))
        return (x if self.gate is None else x + self.gate(x, step)) * self.scalar, None


class Gemma4(Family):
    """QK-norm, a norm without weights over V, scores that are not scaled."""

    defaults: ClassVar = {
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "rope_parameters": _ROPES,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
    }
    outer_type: ClassVar = "gemma4"  # of the multimodal model
    bidirectional_default: ClassVar[str | None] = None  # "vision": features see each other
    fits_float16 = False
    embed_scale = root_of_width
    head_norms = HeadNorms(values=True)
    ignored = ("attention_bias",)
    names: ClassVar = {".experts.switch_glu.": ".switch_mlp."}

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The text_config of a multimodal model, where features may see each other."""
        fields = language_fields(config, cls.outer_type)
        values = {"use_bidirectional_attention": cls.bidirectional_default, **fields.values}
        if values["use_bidirectional_attention"] == "vision":
            values |= {"use_bidirectional_attention": None, SPANS: sees_pictures(config)}
        if values.get("top_k_experts") is not None:
            values["num_experts_per_tok"] = values["top_k_experts"]
        return Fields({**values, "model_type": "gemma4_text"}, fields.where)

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """As stated; the last layer always sees everything."""
        return [*super().layer_types(fields, num_layers)[:-1], FULL]

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        heads = _heads(fields, layer_types, head_dim)
        return tuple(
            cls.rope_spec(fields, kind, dim)
            for kind, (_, dim) in zip(layer_types, heads, strict=True)
        )

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields = config.fields
        types = [FULL if window is None else SLIDING for window in config.windows]
        heads = tuple(_heads(fields, types, config.head_dim))
        for kv_heads, _ in heads:
            if config.num_heads % kv_heads:
                raise CheckpointError(
                    f"num_attention_heads is {config.num_heads}, which {kv_heads} heads for K and "
                    "V in some layer do not divide."
                )
        rope_dims = tuple(_rope_dims(config, index, dim) for index, (_, dim) in enumerate(heads))
        spans = fields.boolean(SPANS, default=False)
        return replace(
            config,
            without_cache=shared(config),
            attention_scale=1.0,
            heads=heads,
            rope_dims=rope_dims,
            sees_spans=tuple(spans and window is not None for window in config.windows),
        )

    @classmethod
    def whole_because(cls, config: ModelConfig) -> str | None:
        keys = ("hidden_size_per_layer_input", "num_kv_shared_layers")
        is_e_model = any(config.fields.integer(key, low=0) for key in keys)
        return FROM_ELSEWHERE if is_e_model else None

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        return between_stages(config)

    def layer(self, index: int) -> Layer:
        path = f"model.layers.{index}"
        names = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
        return ScaledLayer(
            [self.norm(f"{path}.{name}") for name in names],
            self.mixer(index),
            self.mlp(index),
            self.weights.take(f"{path}.layer_scalar", (1,)),
            per_layer_gate(self, index),
        )

    def entry(self) -> Entry | None:
        return per_layer_inputs(self)

    def mixer(self, index: int) -> LayerMixer:
        return shared_or_own(self, index, super().mixer)

    def qkv(self, index: int) -> Projection:
        """Keys are values too in layers that see everything, where the config says so."""
        config, path = self.config, f"model.layers.{index}.self_attn"
        if config.windows[index] is not None or not config.fields.boolean("attention_k_eq_v"):
            return super().qkv(index)
        kv_heads, dim = config.heads_of(index)
        query = self.weights.matrix(f"{path}.q_proj", (config.num_heads * dim, config.hidden_size))
        key = self.weights.matrix(f"{path}.k_proj", (kv_heads * dim, config.hidden_size))
        return fused([query, key, key])

    def head_norm_weight(self, index: int) -> mx.array | None:
        """If keys share numbers with values, the norm's factors for them go to the queries."""
        weight = super().head_norm_weight(index)  # (H + Hkv, D)
        config, rope_dims = self.config, self.config.rope_dims[index]
        if weight is None or not rope_dims:
            return weight
        half = config.heads_of(index)[1] // 2
        is_unrotated = mx.arange(2 * half) % half >= rope_dims // 2
        queries, keys = mx.split(weight, [config.num_heads])
        queries = mx.where(is_unrotated, queries * keys[:1], queries)  # all KV heads have the same
        return mx.concatenate([queries, mx.where(is_unrotated, mx.array(1, keys.dtype), keys)])

    def mlp(self, index: int) -> FeedForward:
        config, weights, path = self.config, self.weights, f"model.layers.{index}"
        dense = NormedMLP(
            self.norm(f"{path}.pre_feedforward_layernorm"),
            self.dense_mlp(f"{path}.mlp", self._inner(index)),
        )
        if not config.fields.boolean("enable_moe_block"):
            return dense
        hidden, count = config.hidden_size, config.num_experts
        scale = weights.take(f"{path}.router.scale", (hidden,)) * hidden**-0.5
        router = weights.linear(f"{path}.router.proj", count, hidden)
        factors = weights.take(f"{path}.router.per_expert_scale", (count,))
        gate_up, down = self.expert_projections(path)
        names = ("feedforward_layernorm_1", "feedforward_layernorm_2")
        return ParallelExperts(
            dense,
            router_norm=RMSNorm(scale, config.rms_norm_eps),
            router=router,
            experts=weights.moe(
                router=router,
                choose=ExpertChoice(
                    Routing(config.experts_per_token, normalised=True), factors=factors
                ),
                gate_up_proj=gate_up,
                down_proj=down,
                activation=self.activation,
            ),
            norms=[
                self.norm(f"{path}.post_{names[0]}"),
                self.norm(f"{path}.pre_{names[1]}"),
                self.norm(f"{path}.post_{names[1]}"),
            ],
        )

    def _inner(self, index: int) -> int:
        """The width of the MLP: twice as wide in layers with shared keys, if the config says so."""
        config = self.config
        wide = config.fields.boolean("use_double_wide_mlp") and config.without_cache[index]
        return config.intermediate_size * (1 + wide)


class Gemma4Unified(Gemma4):
    """Gemma 4 12B, where images and sounds have no encoders: dense, without per-layer inputs."""

    defaults: ClassVar = {
        **Gemma4.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }
    outer_type = "gemma4_unified"
    bidirectional_default = "vision"


def _rope_dims(config: ModelConfig, index: int, head_dim: int) -> int:
    """How many numbers of a key differ from those of its value; 0: keys and values are apart."""
    fields, rope = config.fields, config.ropes[index]
    if config.windows[index] is not None or not fields.boolean("attention_k_eq_v"):
        return 0
    if rope is None or rope.kind != "proportional" or fields.integer("num_kv_shared_layers", low=0):
        return 0
    return head_dim - 2 * rope.num_unrotated if rope.num_unrotated else 0


def _heads(fields: Fields, layer_types: Sequence[str], head_dim: int) -> list[tuple[int, int]]:
    """KV heads and head size of each layer, in either spelling of transformers 5."""
    kv_heads = fields.integer("num_key_value_heads", high=2**14)
    full = kv_heads, fields.integer("global_head_dim", high=2**14)
    if fields.boolean("attention_k_eq_v"):
        full = fields.integer("num_global_key_value_heads", high=2**14, default=kv_heads), full[1]
    heads = [full if kind == FULL else (kv_heads, head_dim) for kind in layer_types]
    overrides = fields.fields("per_layer_config")
    if overrides is None:
        return heads
    for key in overrides.values:
        override = overrides.fields(key)
        if override is None or not key.isdecimal() or int(key) >= len(heads):
            raise CheckpointError(f"{overrides.where} has {key[:40]!r}; expected a layer's number.")
        heads[int(key)] = (
            override.integer("num_key_value_heads", high=2**14, default=kv_heads),
            override.integer("head_dim", high=2**14, default=head_dim),
        )
    return heads
