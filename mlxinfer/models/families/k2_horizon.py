"""K2 Horizon: norms over parts of the hidden state; in MoVA, values from a mixture of experts.

transformers has no class for it. The formulas are those that vLLM, oMLX and llama.cpp's fork share.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import AttentionArgs
from ...layers.linear import Projection
from ...layers.mlp import FeedForward, softplus
from ...layers.moe import ExpertChoice, MoE
from ...layers.norm import Norm
from ...metal_kernels.routing import Routing
from ..config import ModelConfig
from ..family import Family, HeadNorms
from ..jsonfields import Fields
from .biased_experts import V3_KEYS
from .deepseek import shared_expert


@dataclass(slots=True, eq=False)
class GroupedNorm:
    """An RMS norm over each of several parts of the hidden state, with one weight for all of it."""

    weight: mx.array  # (dims,)
    num_groups: int
    eps: float  # added to each mean square

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, dims) to the same shape and dtype."""
        parts = mx.unflatten(x, -1, (self.num_groups, -1))
        return mx.fast.rms_norm(parts, None, self.eps).flatten(-2) * self.weight


@dataclass(slots=True, eq=False)
class WithMixedValues(Projection):
    """Queries and keys of one matrix, values of a mixture of experts."""

    qk_proj: Projection  # (T, hidden) -> (T, (num_heads + num_kv_heads) * head_dim)
    values: MoE  # (T, hidden) -> (T, num_kv_heads * head_dim)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, (num_heads + 2 * num_kv_heads) * head_dim)."""
        y = mx.concatenate([self.qk_proj(x), self.values(x)], axis=-1)
        return y if residual is None else residual + y


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    return x * mx.sigmoid(x)


def base_two_softplus(x: mx.array) -> mx.array:
    """log2(1 + 2^x), which is 1 at 0."""
    return softplus(x * math.log(2)) / math.log(2)


class K2Horizon(Family):
    """K2 Horizon, dense, with experts, and with experts of values (MoVA)."""

    defaults: ClassVar = {
        "layernorm_num_groups": 1,
        "query_key_norm": True,
        "rope_theta": 10_000_000.0,
        "mova_num_experts": 0,
        "num_shared_experts": 0,
        "norm_topk_prob": True,
        "moe_gate_bias": False,
        "router_scaling_factor": 1.0,
    }
    supported: ClassVar = {
        "router_score_func": ("sigmoid", None),
        "attention_gate_func": (None, "softplus"),
    }
    ignored = ("sliding_window",)
    keys = V3_KEYS
    dense_matrices = (".mlp.gate", ".self_attn.v_router")

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """With the part of a head that rotates; without fields of experts if the model has none."""
        values = dict(config.values)
        if (rotated := values.get("rope_head_dim")) is not None:
            heads = config.integer("num_attention_heads", high=2**14)
            dim = config.integer("rope_head_dim", high=cls.head_dim(config, heads))
            values["partial_rotary_factor"] = dim / cls.head_dim(config, heads) if rotated else 1.0
        if not values.get("num_experts"):
            values.pop("num_experts", None)
        return super().language_model(Fields(values, config.where))

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config.fields.require(cls.supported)
        groups = config.fields.integer("layernorm_num_groups", high=config.hidden_size)
        if config.hidden_size % groups:
            raise CheckpointError(
                f"layernorm_num_groups in {config.fields.where} is {groups}; expected a divisor of "
                f"hidden_size, {config.hidden_size}."
            )
        return config

    @classmethod
    def rename(cls, name: str) -> str | None:
        if name.endswith((".mlp.gate.bias", ".self_attn.v_router.bias")):
            name = name.removesuffix("bias") + "e_score_correction_bias"
        return super().rename(name)

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> Norm:
        groups = self.config.fields.integer("layernorm_num_groups")
        if groups == 1 or dims is not None:
            return super().norm(path, dims, eps)
        weight = self.weights.norm(path, self.config.hidden_size)
        return GroupedNorm(weight, groups, self.config.rms_norm_eps if eps is None else eps)

    # -- attention ------------------------------------------------------------------------------

    def head_norm_weight(self, index: int) -> mx.array | None:
        """(H + Hkv, D): each head of Q and K has weights of its own; None: there is no norm."""
        if not self.config.fields.boolean("query_key_norm"):
            return None
        config, path = self.config, f"model.layers.{index}.self_attn"
        dim, counts = config.head_dim, (config.num_heads, config.num_kv_heads)
        parts = [
            self.weights.take(f"{path}.{name}.weight", (count * dim,)).reshape(count, dim)
            for name, count in zip(HeadNorms().names, counts, strict=True)
        ]
        return mx.concatenate(parts)[:, mx.array(self.head_order(1, index))]

    def head_order(self, num_heads: int, index: int) -> list[int]:
        """The checkpoint's index of each number of heads whose first numbers are those that rotate.

        Of each half of a head the first numbers rotate.
        """
        dim = self.config.head_dim
        rotated = self.config.fields.integer("rope_head_dim", default=dim) // 2
        half, rest = dim // 2, range(rotated, dim // 2)
        head = [*range(rotated), *range(half, half + rotated), *rest, *(half + i for i in rest)]
        return [h * dim + i for h in range(num_heads) for i in head]

    def qkv(self, index: int) -> Projection:
        """Q, K and V; values of a mixture of experts in the sparse layers of MoVA."""
        if not self._num_value_experts(index):
            return super().qkv(index)
        config, path = self.config, f"model.layers.{index}.self_attn"
        counts = config.num_heads, config.num_kv_heads
        together = self.weights.fused(
            [f"{path}.{name}_proj" for name in "qk"],
            [count * config.head_dim for count in counts],
            config.hidden_size,
            bias=config.qkv_bias,
            orders=[self.head_order(count, index) for count in counts],
        )
        return WithMixedValues(together, self._values(index))

    def _num_value_experts(self, index: int) -> int:
        count = self.config.fields.integer("mova_num_experts", low=0, high=2**16)
        sparse = self.config.sparse_layers
        return count if sparse and sparse[index] else 0

    def _values(self, index: int) -> MoE:
        config, weights = self.config, self.weights
        if weights.share is not None:
            raise UnsupportedModelError(
                "Ranks cannot share a layer whose values come from experts: divide this model by "
                "layers (pipeline), or run it with ranks=1."
            )
        path, count = f"model.layers.{index}.self_attn", self._num_value_experts(index)
        shape = count, config.num_kv_heads * config.head_dim, config.hidden_size
        stack = weights.experts(f"{path}.switch_v", f"{path}.v_experts.{{}}", shape)
        per_token = config.fields.integer("mova_num_experts_per_tok", high=count)
        return weights.moe(
            router=weights.linear(f"{path}.v_router", count, config.hidden_size),
            choose=self._choice(f"{path}.v_router", count, per_token, normalised=True),
            gate_up_proj=stack.expert_projection(),
            down_proj=lambda y, _: y,  # experts of values have one matrix
            activation=silu,
        )

    def attention_inputs(self, index: int) -> tuple[Projection, Projection | None]:
        gated = self.config.fields.get("attention_gate_func") is not None
        return self.qkv(index), self.gates(index, "gate_proj") if gated else None

    def attention_args(self, index: int) -> AttentionArgs:
        return replace(super().attention_args(index), gate=base_two_softplus)

    # -- experts --------------------------------------------------------------------------------

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        if not config.num_experts or not config.sparse_layers[index]:
            return super().mlp(index)
        choice = self._choice(
            f"{path}.gate",
            config.num_experts,
            config.experts_per_token,
            normalised=config.norm_topk_prob,
        )
        return self.experts(path, choice, shared=shared_expert(self, path))

    def _choice(self, path: str, count: int, k: int, *, normalised: bool) -> ExpertChoice:
        """Sigmoid scores; a bias joins the choice alone, where the config says so."""
        fields, bias = self.config.fields, None
        if fields.boolean("moe_gate_bias"):
            bias = self.weights.raw(f"{path}.e_score_correction_bias", (count,)).astype(mx.float32)
        routing = Routing(
            k,
            sigmoid=True,
            normalised=normalised,
            biased=bias is not None,
            factor=fields.number("router_scaling_factor"),
        )
        return ExpertChoice(routing, bias)
