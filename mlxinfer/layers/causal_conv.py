"""A causal depthwise convolution over the tokens of each sequence, with a state that carries over.

B = sequences, L = tokens of each, K = length of the convolution, C = channels.
"""

import mlx.core as mx


class CausalConv:
    """Each number is a weighted sum of its own values at the last K tokens.

    The state of a sequence is what the next token still sees: the inputs of its last K - 1 tokens,
    zeros where it begins.

    Args:
        weight: (C, K), the oldest token's first.
        bias: (C,); None: there is none.
    """

    __slots__ = ("bias", "channels", "length", "weight")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.channels, self.length = weight.shape
        self.weight = weight[..., None]  # (C, K, 1), as MLX has it
        self.bias = bias

    def __call__(self, inputs: mx.array, state: mx.array) -> mx.array:
        """Inputs (B, L, C) after a state (B, K - 1, C) -> (B, L, C)."""
        y = self.over(_seen(inputs, state))
        return y if self.bias is None else y + self.bias

    def over(self, seen: mx.array) -> mx.array:
        """(B, K - 1 + L, C) -> (B, L, C)."""
        return mx.conv1d(seen, self.weight, groups=self.channels)

    def after(self, inputs: mx.array, state: mx.array, lengths: mx.array | None) -> mx.array:
        """The state (B, K - 1, C) after the first `lengths` (B,) inputs; None: after all."""
        seen = _seen(inputs, state)
        if lengths is None:
            return seen[:, inputs.shape[1] :].astype(state.dtype)
        places = lengths[:, None] + mx.arange(self.length - 1)  # (B, K - 1)
        return mx.take_along_axis(seen, places[..., None], axis=1).astype(state.dtype)


def _seen(inputs: mx.array, state: mx.array) -> mx.array:
    """(B, K - 1 + L, C): the state, then the inputs."""
    return mx.concatenate([state.astype(inputs.dtype), inputs], axis=1)
