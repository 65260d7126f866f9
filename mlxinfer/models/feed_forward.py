"""Feed-forward blocks of a family: MLPs and mixtures of experts, in the layouts that are seen."""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..layers.factory import LayerFactory
from ..layers.mlp import ACTIVATIONS, MLP, FeedForward, Gated, gated
from ..layers.moe import Choose
from .config import ModelConfig
from .language import arrays
from .weights.matrix import StoredMatrix, fused_experts
from .weights.weights import Weights


class FeedForwards:
    """What makes the feed-forward blocks of a model; the part of `Family` that does.

    Attributes:
        transposed_experts: stacks of experts on the hub have inputs before outputs.
        alternating_experts: in packed stacks of experts, rows of gate and up alternate.
    """

    transposed_experts: ClassVar[bool] = False
    alternating_experts: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.make: LayerFactory = weights.make

    @cached_property
    def activation(self) -> Gated:
        """The gated activation of all feed-forward blocks, as the config names it."""
        name = self.config.activation
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"hidden_act is {name!r}; supported are {', '.join(ACTIVATIONS)}."
            )
        return gated(name, self.weights.dtype)

    def dense_mlp(
        self,
        path: str,
        inner: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> MLP:
        """The gate, up and down projections at `path`, `inner` numbers wide."""
        config, weights = self.config, self.weights
        gate_name, up_name, down_name = names
        gate_up = weights.fused(
            [f"{path}.{gate_name}", f"{path}.{up_name}"],
            [inner, inner],
            config.hidden_size,
            bias=config.mlp_bias,
        )
        down = weights.linear(
            f"{path}.{down_name}", config.hidden_size, inner, bias=config.mlp_bias
        )
        return MLP(gate_up, down, self.activation)

    def packed_mlp(self, path: str, inner: int) -> MLP:
        """gate_up_proj, the gate first, and down_proj at `path`, without biases."""
        hidden = self.config.hidden_size
        return MLP(
            self.weights.linear(f"{path}.gate_up_proj", 2 * inner, hidden, parts=[inner, inner]),
            self.weights.linear(f"{path}.down_proj", hidden, inner),
            self.activation,
        )

    def experts(
        self,
        path: str,
        choose: Choose,
        *,
        router: str = "gate",
        shared: FeedForward | None = None,
        weighs_inputs: bool = False,
    ) -> FeedForward:
        """The mixture of experts at `path`.

        Its experts are the stacks `switch_mlp.gate_proj` and so on, as in MLX checkpoints, or
        `experts.0.gate_proj` and so on, or the stacks `experts.gate_up_proj`, the gate first, and
        `experts.down_proj`, as on the hub.
        """
        config, weights = self.config, self.weights
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        packed = any(
            f"{path}.experts.{name}.weight" in weights
            for name in ("gate_up_proj", "down_proj", "0.gate_up_proj")
        )
        if packed:
            shape, kinds = (count, 2 * inner, hidden), [inner, inner]
            parts = [self._packed(f"{path}.experts", "gate_up_proj", shape, kinds)]
        else:
            parts = [self._stacked(path, each, (count, inner, hidden)) for each in ("gate", "up")]
        # One projection after the other: together, the experts and what is made of them are held.
        gate_up = fused_experts(parts, self.make)
        del parts
        weights.evaluate(list(arrays(gate_up)))
        shape = count, hidden, inner
        if packed:
            down = self._packed(f"{path}.experts", "down_proj", shape)
        else:
            down = self._stacked(path, "down", shape)
        mixture = weights.moe(
            router=weights.linear(f"{path}.{router}", count, hidden),
            choose=choose,
            gate_up_proj=gate_up,
            down_proj=down.expert_projection(self.make),
            activation=self.activation,
            shared=shared,
            weighs_inputs=weighs_inputs,
        )
        return weights.block(mixture)

    def _stacked(self, path: str, each: str, shape: tuple[int, int, int]) -> StoredMatrix:
        """The experts' matrices of one name."""
        single = f"{path}.experts.{{}}.{each}_proj"
        return self.weights.experts(f"{path}.switch_mlp.{each}_proj", single, shape)

    def _packed(
        self, path: str, each: str, shape: tuple[int, int, int], parts: Sequence[int] | None = None
    ) -> StoredMatrix:
        """The experts' matrices of one name in the hub's layout: one tensor, or one an expert."""
        name = f"{path}.{each}"
        if not self.transposed_experts:
            return self.weights.experts(name, f"{path}.{{}}.{each}", shape, parts=parts)
        count, out_dims, in_dims = shape
        weight = self.weights.take(f"{name}.weight", (count, in_dims, out_dims), parts=parts)
        stored = StoredMatrix(mx.contiguous(weight.swapaxes(1, 2)))
        return self.weights.named(stored, name, f"{name}.weight", outputs_axis=-1)
