"""gpt-oss: attention sinks, biases everywhere, and experts in three checkpoint formats.

bf16 `gate_up_proj` (E, hidden, 2 inner) with gate and up interleaved; the same as MXFP4 `_blocks`
and `_scales`, transposed; and MLX's `gate_proj` and `up_proj`, quantised in any format. All become
one matrix (E, 2 inner, hidden) whose first half is the gate.
"""

import mlx.core as mx

from ...layers.activations import clamped_swiglu
from ...layers.moe import (
    ExpertLinear,
    ExpertProjection,
    MoE,
    QuantizedExpertLinear,
    top_k_softmax,
)
from ..build import Plan, build_decoder
from ..config import ModelConfig
from ..decoder import FeedForward, Model
from ..fuse import fuse_experts
from ..quantization import MXFP4
from ..weights import Weights


def rename(name: str) -> str | None:
    """Names are the decoder's own."""
    return name


def build(config: ModelConfig, weights: Weights) -> Model:
    """Learned sinks in every layer."""
    return build_decoder(config, weights, Plan(sinks=True, make_mlp=make_mlp))


def make_mlp(config: ModelConfig, weights: Weights, index: int, path: str) -> FeedForward:
    """Every layer is a mixture of experts, with a bias in the router too."""
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    experts = f"{path}.experts"
    return MoE(
        router=weights.linear(f"{path}.router", count, hidden, bias=True),
        choose=top_k_softmax(config.experts_per_token),
        gate_up_proj=_gate_up(weights, experts, (count, 2 * inner, hidden)),
        down_proj=_down(weights, experts, (count, hidden, inner)),
        activation=clamped_swiglu(
            weights.dtype,
            alpha=config.fields.number("swiglu_alpha", default=1.702),
            limit=config.fields.number("swiglu_limit", above=0.0, default=7.0),
        ),
    )


def _gate_up(weights: Weights, path: str, shape: tuple[int, int, int]) -> ExpertProjection:
    count, rows, hidden = shape
    if f"{path}.gate_proj.weight" in weights:
        half = (count, rows // 2, hidden)
        names = ("gate_proj", "up_proj")
        return fuse_experts([weights.experts(f"{path}.{n}", half, bias=True) for n in names])
    bias = _apart(weights.take(f"{path}.gate_up_proj_bias", shape[:2]))
    if f"{path}.gate_up_proj" in weights:
        weight = weights.take(f"{path}.gate_up_proj", (count, hidden, rows)).swapaxes(1, 2)
        return ExpertLinear(_apart(weight), bias)
    weight, scales = _blocks(weights, f"{path}.gate_up_proj", shape)
    return _mxfp4(_apart(weight), _apart(scales), bias)


def _down(weights: Weights, path: str, shape: tuple[int, int, int]) -> ExpertProjection:
    count, hidden, inner = shape
    if f"{path}.down_proj.weight" in weights:
        return weights.experts(f"{path}.down_proj", shape, bias=True)
    bias = weights.take(f"{path}.down_proj_bias", shape[:2])
    if f"{path}.down_proj" in weights:
        weight = weights.take(f"{path}.down_proj", (count, inner, hidden)).swapaxes(1, 2)
        return ExpertLinear(mx.contiguous(weight), bias)
    return _mxfp4(*_blocks(weights, f"{path}.down_proj", shape), bias)


def _blocks(weights: Weights, path: str, shape: tuple[int, int, int]) -> tuple[mx.array, mx.array]:
    """MXFP4 as published: 16 bytes of two numbers each and one exponent per 32 inputs."""
    count, rows, in_dims = shape
    groups = in_dims // MXFP4.group_size
    packed = weights.raw(f"{path}_blocks", (count, rows, groups, 16), dtype=mx.uint8)
    scales = weights.raw(f"{path}_scales", (count, rows, groups), dtype=mx.uint8)
    return packed.reshape(count, rows, -1).view(mx.uint32), scales


def _mxfp4(weight: mx.array, scales: mx.array, bias: mx.array) -> QuantizedExpertLinear:
    return QuantizedExpertLinear(
        weight, scales, None, bias, group_size=32, bits=MXFP4.bits, mode=MXFP4.mode
    )


def _apart(rows: mx.array) -> mx.array:
    """Gate and up rows (axis 1) that alternate, as two blocks."""
    return mx.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)
