"""gpt-oss: attention sinks, biases everywhere, and experts in three checkpoint formats.

bf16 `gate_up_proj` (E, hidden, 2 inner) with gate and up interleaved; the same as MXFP4 `_blocks`
and `_scales`, transposed; and MLX's `gate_proj` and `up_proj`, quantised in any format, stacked or
one by one. All become one matrix (E, 2 inner, hidden) with the gate as its first half.
"""

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import mlx.core as mx

from ...layers.mlp import FeedForward, Gated, clamped_swiglu
from ...layers.moe import ExpertChoice, ExpertProjection
from ...metal_kernels.routing import Routing
from ..experts import AlternatingExperts
from ..family import Family, learned_sinks
from ..quantization import MXFP4
from ..weights.matrix import StoredMatrix, fused_experts


class GptOss(Family):
    """Learned sinks, biases and a mixture of experts in every layer."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "experts_per_token": 4,
    }
    sinks = learned_sinks
    stacks = ()  # MLX's are laid out otherwise
    packed_experts = AlternatingExperts()

    @cached_property
    def activation(self) -> Gated:
        fields = self.config.fields
        return clamped_swiglu(
            self.weights.dtype,
            alpha=fields.number("swiglu_alpha", default=1.702),
            limit=fields.number("swiglu_limit", above=0.0, default=7.0),
        )

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
        return self.weights.block(
            self.weights.moe(
                router=self.weights.linear(f"{path}.router", count, hidden, bias=True),
                choose=ExpertChoice(Routing(config.experts_per_token, normalised=True)),
                gate_up_proj=self._gate_up(f"{path}.experts", (count, 2 * inner, hidden)),
                down_proj=self._down(f"{path}.experts", (count, hidden, inner)),
                activation=self.activation,
            )
        )

    def _gate_up(self, path: str, shape: tuple[int, int, int]) -> ExpertProjection:
        weights, (count, rows, hidden) = self.weights, shape
        if not self._is_published(path):
            half = (count, rows // 2, hidden)
            parts = [
                weights.experts(f"{path}.{name}", f"{path}.{{}}.{name}", half, bias=True)
                for name in ("gate_proj", "up_proj")
            ]
            return fused_experts(parts)
        gate_up = self._published(f"{path}.gate_up_proj", shape)
        order = [*range(0, rows, 2), *range(1, rows, 2)]  # gates and ups alternate
        return gate_up.reordered(order).expert_projection()

    def _down(self, path: str, shape: tuple[int, int, int]) -> ExpertProjection:
        name = f"{path}.down_proj"
        if not self._is_published(path):
            stored = self.weights.experts(name, f"{path}.{{}}.down_proj", shape, bias=True)
        else:
            stored = self._published(name, shape)
            assert stored.bias is not None
            stored = replace(stored, bias=self.weights.once(stored.bias))
        return stored.expert_projection()

    def _is_published(self, path: str) -> bool:
        names = (f"{path}.{name}" for name in ("gate_up_proj", "down_proj"))
        return any(f"{name}{end}" in self.weights for name in names for end in ("", "_blocks"))

    def _published(self, path: str, shape: tuple[int, int, int]) -> StoredMatrix:
        """As on the hub: dense and transposed, or 16 bytes of two numbers each per exponent."""
        weights, (count, rows, in_dims) = self.weights, shape
        bias = weights.take(f"{path}_bias", (count, rows))
        if path in weights:
            weight = weights.take(path, (count, in_dims, rows)).swapaxes(1, 2)
            stored = StoredMatrix(mx.contiguous(weight), bias)
            return weights.named(stored, path, path, outputs_axis=-1)
        groups = in_dims // MXFP4.group_size
        blocks = weights.raw(f"{path}_blocks", (count, rows, groups, 16), dtype=mx.uint8)
        scales = weights.raw(f"{path}_scales", (count, rows, groups), dtype=mx.uint8)
        packed = blocks.reshape(count, rows, -1).view(mx.uint32)
        stored = StoredMatrix(packed, bias, scales, None, MXFP4)
        return weights.named(stored, path, f"{path}_blocks", outputs_axis=-3)
