"""gpt-oss: attention sinks, biases everywhere, and experts in three checkpoint formats.

bf16 `gate_up_proj` (E, hidden, 2 inner) with gate and up interleaved; the same as MXFP4 `_blocks`
and `_scales`, transposed; and MLX's `gate_proj` and `up_proj`, quantised in any format. All become
one matrix (E, 2 inner, hidden) whose first half is the gate.
"""

import mlx.core as mx

from ...layers.activations import clamped_swiglu
from ...layers.experts import ExpertProjection
from ...layers.moe import MoE, top_k_softmax
from ..build import Plan, build_decoder
from ..config import ModelConfig
from ..decoder import FeedForward, Model
from ..quantization import MXFP4
from ..stored import Stored, fused_experts
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
        return fused_experts([weights.matrix(f"{path}.{n}", half, bias=True) for n in names])
    both = _published(weights, f"{path}.gate_up_proj", shape)
    assert both.bias is not None
    scales = None if both.scales is None else _apart(both.scales)
    apart = Stored(_apart(both.weight), _apart(both.bias), scales, None, both.form)
    return apart.expert_projection()


def _down(weights: Weights, path: str, shape: tuple[int, int, int]) -> ExpertProjection:
    if f"{path}.down_proj.weight" in weights:
        return weights.matrix(f"{path}.down_proj", shape, bias=True).expert_projection()
    return _published(weights, f"{path}.down_proj", shape).expert_projection()


def _published(weights: Weights, path: str, shape: tuple[int, int, int]) -> Stored:
    """As on the hub: dense and transposed, or 16 bytes of two numbers each per exponent."""
    count, rows, in_dims = shape
    bias = weights.take(f"{path}_bias", (count, rows))
    if path in weights:
        weight = weights.take(path, (count, in_dims, rows)).swapaxes(1, 2)
        return Stored(mx.contiguous(weight), bias)
    groups = in_dims // MXFP4.group_size
    blocks = weights.raw(f"{path}_blocks", (count, rows, groups, 16), dtype=mx.uint8)
    scales = weights.raw(f"{path}_scales", (count, rows, groups), dtype=mx.uint8)
    return Stored(blocks.reshape(count, rows, -1).view(mx.uint32), bias, scales, None, MXFP4)


def _apart(rows: mx.array) -> mx.array:
    """Gate and up rows (axis 1) that alternate, as two blocks."""
    return mx.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)
