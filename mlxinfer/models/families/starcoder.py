"""StarCoder 2: layer norms, blocks without gates, biases everywhere."""

from typing import ClassVar

from ...layers.mlp import MLP, FeedForward, plain
from ...layers.norm import LayerNorm
from ..family import Family


class Starcoder2(Family):
    """StarCoder 2: every layer has the window that the config states."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "use_bias": True,
        "tie_word_embeddings": True,
    }
    biases = ("use_bias", "use_bias")

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> LayerNorm:
        width = self.config.hidden_size if dims is None else dims
        stated = self.config.fields.number("norm_epsilon", low=0.0, high=1.0)
        weight, bias = (
            self.weights.take(f"{path}.{part}", (width,)) for part in ("weight", "bias")
        )
        return LayerNorm(weight, stated if eps is None else eps, bias)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        sizes, bias = (config.intermediate_size, config.hidden_size), config.o_bias
        return MLP(
            self.weights.linear(f"{path}.c_fc", *sizes, bias=bias),
            self.weights.linear(f"{path}.c_proj", *reversed(sizes), bias=bias),
            plain(config.activation),
        )
