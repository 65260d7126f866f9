"""Mixtures of experts over a flat list of tokens. Knows routers; what experts are is experts.py.

Each token goes to `k` of the experts; its output is their outputs, weighted by the router.
"""

from collections.abc import Callable

import mlx.core as mx

from .activations import Gated
from .experts import ExpertProjection
from .linear import Projection

# From this many (token, expert) pairs on, pairs are sorted by expert, so that each expert's matrix
# is read once: MLX's gather kernels have a faster path for that.
SORT_FROM = 64

Choose = Callable[[mx.array], tuple[mx.array, mx.array]]
"""Router logits (T, E) to expert weights (T, k) and expert indices (T, k)."""


class MoE:
    """Router, gated experts, and the weighted sum of what they say."""

    __slots__ = ("activation", "choose", "down_proj", "gate_up_proj", "router")

    def __init__(
        self,
        *,
        router: Projection,
        choose: Choose,
        gate_up_proj: ExpertProjection,
        down_proj: ExpertProjection,
        activation: Gated,
    ) -> None:
        self.router = router
        self.choose = choose
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        weights, experts = self.choose(self.router(x))  # (T, k) each
        y = self._sorted(x, experts) if experts.size >= SORT_FROM else self._direct(x, experts)
        return (weights[:, None] @ y)[:, 0]

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual (T, hidden) + self(x)."""
        return residual + self(x)

    def _direct(self, x: mx.array, experts: mx.array) -> mx.array:
        return self._run(x[:, None, None], experts, False)[..., 0, :]  # (T, k, hidden)

    def _sorted(self, x: mx.array, experts: mx.array) -> mx.array:
        num_tokens, k = experts.shape
        flat = experts.reshape(-1)
        order = mx.argsort(flat)
        y = self._run(x[order // k][:, None], flat[order], True)  # (T k, 1, hidden)
        return y[:, 0][mx.argsort(order)].reshape(num_tokens, k, -1)

    def _run(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        inner = self.activation(self.gate_up_proj(x, experts, in_order))
        return self.down_proj(inner, experts, in_order)


def top_k_softmax(k: int) -> Choose:
    """The k largest logits, and a softmax over these: what a normalised softmax-then-top-k is."""

    def choose(logits: mx.array) -> tuple[mx.array, mx.array]:
        experts = mx.argpartition(logits, kth=-k, axis=-1)[:, -k:]
        chosen = mx.take_along_axis(logits, experts, axis=-1)
        return mx.softmax(chosen, axis=-1, precise=True), experts

    return choose


def softmax_top_k(k: int) -> Choose:
    """A softmax over all experts, of which the k largest are taken as they are."""

    def choose(logits: mx.array) -> tuple[mx.array, mx.array]:
        weights = mx.softmax(logits, axis=-1, precise=True)
        experts = mx.argpartition(weights, kth=-k, axis=-1)[:, -k:]
        return mx.take_along_axis(weights, experts, axis=-1), experts

    return choose
