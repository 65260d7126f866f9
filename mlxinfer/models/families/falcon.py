"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a multiplier for each matrix.

The multipliers are put into the matrices as these are loaded. Checkpoints of MLX have most of them
there already; the layout of the convolutions tells the two apart.
"""

from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.attention import Attention, LayerMixer, ParallelMixers
from ...layers.linear import Projection
from ...layers.mamba2 import Mamba2
from ...layers.mlp import MLP, FeedForward
from ..config import ModelConfig
from ..family import Family
from ..jsonfields import Fields
from ..weights.matrix import StoredMatrix, fused
from ..weights.weights import Weights
from .mamba import MambaDims, group_norm, mamba_mixer, step_limits


class FalconH1(Family):
    """Outputs of both mixers are added up."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "key_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }
    final_norm = "model.final_layernorm"
    block_norms = ("input_layernorm", None, "pre_ff_layernorm", None)
    ignored = ("sliding_window",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        _dims(config.fields)
        for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            _numbers(config.fields, key, count)
        factor, scale = (
            config.fields.number(key) for key in ("key_multiplier", "lm_head_multiplier")
        )
        scores = config.attention_scale * factor
        return replace(config, attention_scale=scores, logit_scale=scale)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.dims = _dims(config.fields)
        name = "model.layers.0.mamba.conv1d.weight"
        self.of_mlx = weights.has_shape(name, (self.dims.channels, self.dims.conv, 1))
        if self.of_mlx:  # its tables are multiplied already, and are one if they are tied
            assert config.logit_scale is not None
            tied = config.logit_scale / config.fields.number("embedding_multiplier")
            config = replace(config, logit_scale=tied if config.tie_word_embeddings else 1.0)
        super().__init__(config, weights)

    def embed_scale(self) -> float | None:
        return None if self.of_mlx else self.config.fields.number("embedding_multiplier")

    def mixer(self, index: int) -> LayerMixer:
        """Mamba-2 and attention."""
        attention = super().mixer(index)
        assert isinstance(attention, Attention)
        return ParallelMixers([self.mamba(index), attention])

    def mamba(self, index: int) -> Mamba2:
        config, path, dims = self.config, f"model.layers.{index}.mamba", self.dims
        fields, hidden = config.fields, config.hidden_size
        in_proj = self._matrix(
            f"{path}.in_proj", dims.projected, hidden, fields.boolean("mamba_proj_bias")
        )
        if not self.of_mlx:
            scaled = in_proj.scaled(fields.number("ssm_in_multiplier"), bias=False)
            in_proj = scaled.scaled(_by_part(fields, dims))
        eps = config.rms_norm_eps
        normed = fields.boolean("mamba_rms_norm")
        return mamba_mixer(
            self,
            path,
            dims,
            in_proj=in_proj.projection(),
            out_proj=self._scaled(
                f"{path}.out_proj",
                (hidden, dims.inner),
                fields.number("ssm_out_multiplier"),
                bias=fields.boolean("projectors_bias"),
            ),
            norm=group_norm(self, path, dims, eps) if normed else None,
            gate_first=not fields.boolean("mamba_norm_before_gate"),
            conv_bias=fields.boolean("mamba_conv_bias"),
            step_limits=step_limits(fields),
        )

    def qkv(self, index: int) -> Projection:
        """The multiplier of attention's input; MLX leaves it out of V."""
        config, path = self.config, f"model.layers.{index}.self_attn"
        factor, parts = config.fields.number("attention_in_multiplier"), []
        for name, heads in zip("qkv", (config.num_heads, *[config.num_kv_heads] * 2), strict=True):
            rows = heads * config.head_dim
            stored = self._matrix(f"{path}.{name}_proj", rows, config.hidden_size, config.qkv_bias)
            is_scaled = self.of_mlx and name != "v"
            parts.append(stored if is_scaled else stored.scaled(factor, bias=False))
        return fused(parts)

    def attention_output(self, path: str, inner: int) -> Projection:
        shape = self.config.hidden_size, inner
        factor = self.config.fields.number("attention_out_multiplier")
        return self._scaled(path, shape, factor, bias=self.config.o_bias)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.feed_forward"
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate_factor, down_factor = _numbers(config.fields, "mlp_multipliers", 2)
        gate, up = (self._matrix(f"{path}.{n}_proj", inner, hidden, bias) for n in ("gate", "up"))
        gate = gate if self.of_mlx else gate.scaled(gate_factor)
        down = self._scaled(f"{path}.down_proj", (hidden, inner), down_factor, bias=bias)
        return MLP(fused([gate, up]), down, self.activation)

    def _matrix(self, path: str, out_dims: int, in_dims: int, bias: bool) -> StoredMatrix:
        return self.weights.matrix(path, (out_dims, in_dims), bias=bias)

    def _scaled(
        self, path: str, shape: tuple[int, int], factor: float, *, bias: bool
    ) -> Projection:
        stored = self._matrix(path, *shape, bias)
        return (stored if self.of_mlx else stored.scaled(factor)).projection()


def _dims(fields: Fields) -> MambaDims:
    if fields.get("mamba_d_ssm") is not None:
        return MambaDims.of(fields, width=fields.integer("mamba_d_ssm", high=2**22))
    width = fields.integer("mamba_expand", high=2**10) * fields.integer("hidden_size", high=2**20)
    return MambaDims.of(fields, width=width)


def _by_part(fields: Fields, dims: MambaDims) -> mx.array:
    """(projected,) the multipliers of gates, inputs, keys, queries and time steps."""
    shared = dims.groups * dims.state
    counts = [dims.inner, dims.inner, shared, shared, dims.heads]
    parts = zip(_numbers(fields, "ssm_multipliers", 5), counts, strict=True)
    return mx.concatenate([mx.full((count,), factor) for factor, count in parts])


def _numbers(fields: Fields, key: str, count: int) -> list[float]:
    stated: list[Any] = fields.items(key) or []
    if len(stated) != count or not all(
        type(one) in (int, float) and abs(one) < 1e6 for one in stated
    ):
        raise CheckpointError(f"{key} in {fields.where} must be a list of {count} numbers.")
    return [float(one) for one in stated]
