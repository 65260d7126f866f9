"""Qwen 3 mixtures of experts: Qwen 3 with a router and experts in place of (some) MLPs."""

from ...layers.moe import MoE, softmax_top_k, top_k_softmax
from ..build import Plan, activation, build_decoder, make_dense_mlp
from ..config import ModelConfig
from ..decoder import FeedForward, Model
from ..stored import Stored, fused_experts, stacked
from ..weights import Weights


def rename(name: str) -> str | None:
    """Names are the decoder's own."""
    return name


def build(config: ModelConfig, weights: Weights) -> Model:
    """QK-norm as in Qwen 3."""
    return build_decoder(config, weights, Plan(qk_norm=True, make_mlp=make_mlp))


def make_mlp(config: ModelConfig, weights: Weights, index: int, path: str) -> FeedForward:
    """A mixture of experts, or a dense MLP where the config leaves a layer dense."""
    if not config.sparse_layers[index]:
        return make_dense_mlp(config, weights, index, path)
    hidden, inner, k = config.hidden_size, config.moe_intermediate_size, config.experts_per_token
    gate, up = (_experts(config, weights, path, name, inner, hidden) for name in ("gate", "up"))
    return MoE(
        router=weights.linear(f"{path}.gate", config.num_experts, hidden),
        choose=top_k_softmax(k) if config.norm_topk_prob else softmax_top_k(k),
        gate_up_proj=fused_experts([gate, up]),
        down_proj=_experts(config, weights, path, "down", hidden, inner).expert_projection(),
        activation=activation(config, weights),
    )


def _experts(
    config: ModelConfig, weights: Weights, path: str, name: str, out_dims: int, in_dims: int
) -> Stored:
    """One stacked tensor, as MLX checkpoints have it, or one tensor per expert, as on the hub."""
    whole = f"{path}.switch_mlp.{name}_proj"
    if f"{whole}.weight" in weights:
        return weights.matrix(whole, (config.num_experts, out_dims, in_dims))
    return stacked(
        [
            weights.matrix(f"{path}.experts.{expert}.{name}_proj", (out_dims, in_dims))
            for expert in range(config.num_experts)
        ]
    )
