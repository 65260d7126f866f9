"""Qwen3-Next and Qwen 3.5 to 3.8: Gated DeltaNet, and every few layers attention with a gate."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...cache_specs import StateSpec
from ...errors import CheckpointError
from ...layers.attention import LayerMixer
from ...layers.gated_delta import GatedDeltaNet
from ...layers.linear import Projection
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice, GatedExpert
from ...layers.norm import RMSNorm
from ...metal_kernels.routing import Routing
from ..config import FULL, ModelConfig
from ..family import Family, HeadNorms, MTPForm
from ..jsonfields import Fields
from ..weights.matrix import StoredMatrix, fused
from ..weights.weights import Weights
from .recurrent import causal_conv, with_states

_RECURRENT = "linear_attention"


class Qwen3Next(Family):
    """Partial rope, QK-norm, norm weights stored less one, experts with a gated shared one."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32_768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "mrope_interleaved": True,  # in Qwen 3.5
    }
    head_norms = HeadNorms()
    mtp: ClassVar[MTPForm | None] = MTPForm(norm_offset=1.0)  # in MLX checkpoints, too
    ignored = ("sliding_window",)
    sigmoid_gates: bool = False  # of Gated DeltaNet; else silu

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.norm_offset = 0.0 if self._of_mlx() else 1.0

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return with_delta_states(config, config.fields)

    @classmethod
    def rename(cls, name: str) -> str | None:
        return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"

    def mixer(self, index: int) -> LayerMixer:
        state = self.config.states[index]
        if state is None:
            return super().mixer(index)
        config, weights = self.config, self.weights
        path, heads, values = f"model.layers.{index}.linear_attn", *value_heads(state)
        return GatedDeltaNet(
            in_proj=fused(self.delta_inputs(path, state)),
            out_proj=weights.linear(f"{path}.out_proj", config.hidden_size, heads * values),
            conv=causal_conv(self, f"{path}.conv1d", state, parts=conv_widths(state)),
            norm=RMSNorm(weights.take(f"{path}.norm.weight", (values,)), config.rms_norm_eps),
            log_rate=weights.raw(f"{path}.A_log", (heads,)).astype(mx.float32),
            step_bias=weights.raw(f"{path}.dt_bias", (heads,)).astype(mx.float32),
            spec=state,
            sigmoid_gates=self.sigmoid_gates,
        )

    def delta_inputs(self, path: str, state: StateSpec) -> list[StoredMatrix]:
        """The input projections of Gated DeltaNet: two matrices ordered by key head."""
        _, (values, value_dim, key_dim) = (shape for shape, _ in state.shapes)
        keys = self.config.fields.integer("linear_num_key_heads")
        served = values // keys  # value heads of a key head
        widths = [key_dim, key_dim, served * value_dim, served * value_dim]
        qkvz = self._matrix(f"{path}.in_proj_qkvz", keys * sum(widths))
        ba = self._matrix(f"{path}.in_proj_ba", 2 * values)
        return [
            qkvz.reordered(_by_kind(keys, widths)),
            ba.reordered(_by_kind(keys, [served, served])),
        ]

    def attention_inputs(self, index: int) -> tuple[Projection, Projection]:
        """Each head of q_proj is a query, then its gate."""
        config, dim = self.config, self.config.head_dim
        path = f"model.layers.{index}.self_attn"
        q_proj = self._matrix(f"{path}.q_proj", 2 * config.num_heads * dim)
        order, middle = _by_kind(config.num_heads, [dim, dim]), config.num_heads * dim
        queries, gates = (q_proj.reordered(half) for half in (order[:middle], order[middle:]))
        keys_values = [self._matrix(f"{path}.{n}_proj", config.num_kv_heads * dim) for n in "kv"]
        return fused([queries, *keys_values]), gates.projection()

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        if not config.sparse_layers or not config.sparse_layers[index]:
            return super().mlp(index)
        k = config.experts_per_token
        inner = config.fields.integer("shared_expert_intermediate_size", high=2**22)
        shared = GatedExpert(
            self.dense_mlp(f"{path}.shared_expert", inner),
            self.weights.linear(f"{path}.shared_expert_gate", 1, config.hidden_size),
        )
        choose = ExpertChoice(Routing(k, normalised=config.norm_topk_prob))
        return self.experts(path, choose, shared=shared)

    def _matrix(self, path: str, out_dims: int, parts: Sequence[int] | None = None) -> StoredMatrix:
        """A matrix that reads hidden states, with a bias if attention has biases."""
        bias = self.config.qkv_bias and ".self_attn." in path
        shape = out_dims, self.config.hidden_size
        return self.weights.matrix(path, shape, bias=bias, parts=parts)

    def _of_mlx(self) -> bool:
        """Whether the checkpoint has the layout of MLX, which stores norm weights as they are.

        The layout of the convolutions tells the two apart.
        """
        states = enumerate(self.config.states)
        index, state = next(((i, one) for i, one in states if one is not None), (0, None))
        if state is None:
            return False
        before, channels = state.shapes[0][0]
        name = f"model.layers.{index}.linear_attn.conv1d.weight"
        return self.weights.has_shape(name, (channels, before + 1, 1))


class Qwen3_5(Qwen3Next):
    """Qwen 3.5 to 3.8, dense, alone or as the language model of a multimodal checkpoint."""

    defaults: ClassVar = {
        key: value
        for key, value in Qwen3Next.defaults.items()
        if "expert" not in key and key not in ("intermediate_size", "moe_intermediate_size")
    } | {"num_key_value_heads": 4, "vocab_size": 248_320}

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The text_config of a multimodal model, by the name that MLX has for both."""
        fields = config.fields("text_config") or config
        kind = fields.text("model_type", default=config.text("model_type")).removesuffix("_text")
        return Fields({**fields.values, "model_type": kind}, fields.where)

    def delta_inputs(self, path: str, state: StateSpec) -> list[StoredMatrix]:
        (_, channels), (values, value_dim, _) = (shape for shape, _ in state.shapes)
        rows = {"z": values * value_dim, "b": values, "a": values}
        qkv = self._matrix(f"{path}.in_proj_qkv", channels, parts=conv_widths(state))
        return [qkv, *[self._matrix(f"{path}.in_proj_{kind}", n) for kind, n in rows.items()]]


class Qwen3_5MoE(Qwen3_5):
    """The same with experts in every layer."""

    defaults: ClassVar = Qwen3Next.defaults | {
        "vocab_size": 248_320,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }


def with_delta_states(config: ModelConfig, fields: Fields) -> ModelConfig:
    recurs = _recurs(fields, config.num_layers)
    return with_states(replace(config, fields=fields), _state(fields), recurs)


def _recurs(fields: Fields, num_layers: int) -> list[bool]:
    """For each layer, whether it is recurrent: by a list, or by attention's interval."""
    stated = fields.by_layer("layer_types", count=num_layers, known=(_RECURRENT, FULL))
    if stated is None:
        interval = fields.integer("full_attention_interval", high=2**20)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    return [kind == _RECURRENT for kind in stated]


def _state(fields: Fields) -> StateSpec:
    """The state of a recurrent layer: the convolution's inputs, a matrix for each value head."""
    keys = fields.integer("linear_num_key_heads", high=2**14)
    values = fields.integer("linear_num_value_heads", high=2**14)
    if values % keys:
        raise CheckpointError(
            f"linear_num_value_heads is {values}, which linear_num_key_heads, {keys}, does not "
            "divide."
        )
    key_dim = fields.integer("linear_key_head_dim", high=2**14)
    value_dim = fields.integer("linear_value_head_dim", high=2**14)
    length = fields.integer("linear_conv_kernel_dim", low=2, high=64)
    channels = 2 * keys * key_dim + values * value_dim
    return StateSpec(
        (((length - 1, channels), "float32"), ((values, value_dim, key_dim), "float32"))
    )


def value_heads(state: StateSpec) -> tuple[int, int]:
    heads, values, _ = state.shapes[1][0]
    return heads, values


def conv_widths(state: StateSpec) -> list[int]:
    (_, channels), (heads, values, _) = (shape for shape, _ in state.shapes)
    keys = (channels - heads * values) // 2
    return [keys, keys, heads * values]


def _by_kind(num_heads: int, widths: Sequence[int]) -> list[int]:
    """Outputs that lie side by side in each head, ordered by kind and then by head."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [
        head * sum(widths) + start + place
        for start, width in zip(starts, widths, strict=True)
        for head in range(num_heads)
        for place in range(width)
    ]
