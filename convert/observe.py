"""Which inputs of each matrix matter: second moments of what flows into it. Knows no files.

An error in a weight costs its square times the mean square of the input that it meets; so these
weigh the squared errors when scales are chosen (llama.cpp calls them the importance matrix).
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..layers.experts import ExpertProjection
from ..layers.linear import Projection
from ..layers.moe import MoE
from ..models.decoder import FeedForward
from ..models.weights import Weights
from .numbers import Floats

LEAST = 1e-4  # of the mean: a channel that the text never used still has some weight


class Moments:
    """Sums of squares by path; counts only while `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self._squares: dict[str, Floats] = {}

    def see(self, paths: Sequence[str], x: mx.array) -> None:
        """x (..., in_dims) flows into these matrices."""
        if not self.watching:
            return
        flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        squares = np.array(mx.sum(flat * flat, axis=0))
        for path in paths:
            known = self._squares.get(path)
            self._squares[path] = squares if known is None else known + squares

    def taken(self, path: str) -> Floats | None:
        """What was seen at `path`, (in_dims,), mean 1, and no longer kept; None: nothing."""
        squares = self._squares.pop(path, None)
        return None if squares is None else normalised(squares)


class Observed:
    """A projection that tells what it is given."""

    __slots__ = ("moments", "paths", "projection")

    def __init__(self, projection: Projection, paths: Sequence[str], moments: Moments) -> None:
        self.projection = projection
        self.paths = tuple(paths)
        self.moments = moments

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, in_dims) -> (T, out_dims)."""
        self.moments.see(self.paths, x)
        return self.projection(x)

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual + self(x)."""
        self.moments.see(self.paths, x)
        return self.projection.onto(residual, x)


class ObservedExperts:
    """The same for stacked experts; one set of moments for the whole stack."""

    __slots__ = ("experts", "moments", "paths")

    def __init__(self, experts: ExpertProjection, paths: Sequence[str], moments: Moments) -> None:
        self.experts = experts
        self.paths = tuple(paths)
        self.moments = moments

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, out_dims)."""
        self.moments.see(self.paths, x)
        return self.experts(x, experts, in_order)


class ObservedWeights(Weights):
    """Weights whose projections tell what they are given."""

    moments: Moments

    def linear(self, path: str, out_dims: int, in_dims: int, *, bias: bool = False) -> Projection:
        """As of Weights."""
        made = super().linear(path, out_dims, in_dims, bias=bias)
        return Observed(made, [path], self.moments)

    def fused(
        self, paths: Sequence[str], out_dims: Sequence[int], in_dims: int, *, bias: bool = False
    ) -> Projection:
        """As of Weights."""
        made = super().fused(paths, out_dims, in_dims, bias=bias)
        return Observed(made, paths, self.moments)


def observe_experts(mlp: FeedForward, paths: Sequence[str], moments: Moments) -> None:
    """Watch the experts of a mixture, whose stacks are at `paths`."""
    if not isinstance(mlp, MoE):
        return
    down = [path for path in paths if path.endswith("down_proj")]
    others = [path for path in paths if not path.endswith("down_proj")]
    mlp.gate_up_proj = ObservedExperts(mlp.gate_up_proj, others, moments)
    mlp.down_proj = ObservedExperts(mlp.down_proj, down, moments)


def normalised(squares: Floats) -> Floats:
    """Sums of squares (in_dims,) as weights of mean 1."""
    mean = squares.mean()
    if not mean > 0:
        return np.ones_like(squares)
    found: Floats = np.maximum(squares / mean, np.float32(LEAST)).astype(np.float32)
    return found / found.mean()
