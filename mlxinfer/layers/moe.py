"""Mixtures of experts: routers, stacks of expert matrices, and the block that joins them.

Each token goes to `k` of the experts; its output is their outputs, weighted by the router.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..metal_kernels.routing import Routing, choose_experts, route, weigh_experts
from ..metal_kernels.variants import ANY_ROWS, KernelUse, ModelForm, ReadyFor
from .linear import Projection, QuantizedMatrix
from .mlp import Activation, FeedForward

# From this many (token, expert) pairs on, pairs are sorted by expert, so that each expert's matrix
# is read once: MLX's gather kernels have a faster path for that.
SORT_FROM = 64


class Choose(Protocol):
    """Router logits (T, E) -> weights (T, k) and experts (T, k)."""

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels that can do its work."""

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """The experts of each token and their weights."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Pairs of a row and an expert that it goes to, and the order in which they stand."""

    experts: mx.array  # (...) of each pair
    in_order: bool  # pairs stand sorted by expert
    per_row: int  # experts of each row
    rows_per_token: int = 1  # rows for each token of the step
    # (pairs,) where each pair stands, row by row; None: there, (rows, per_row)
    places: mx.array | None = None


class ExpertProjection(Protocol):
    """One matrix per expert; each row of x is multiplied with the matrix of its expert."""

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""


@dataclass(slots=True, eq=False, kw_only=True)
class MoE:
    """Router, experts, and the weighted sum of the experts' outputs."""

    router: Projection  # (T, hidden) -> logits (T, E)
    choose: Choose  # the experts of each token and their weights
    gate_up_proj: ExpertProjection  # without gates it goes up alone
    down_proj: ExpertProjection
    activation: Activation  # between the two
    shared: FeedForward | None = None  # every token goes to it, with weight 1
    weighs_inputs: bool = False  # weights multiply the inputs of the experts, not their outputs

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        shared = [] if self.shared is None else self.shared.kernels(model)
        return [*self.choose.kernels(model), *shared]

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.mix(x, self.router(x), residual)

    def mix(self, x: mx.array, logits: mx.array, residual: mx.array | None = None) -> mx.array:
        """The same with router logits (T, E) from the caller."""
        weights, experts = self.choose(logits)  # (T, k) each
        if self.weighs_inputs:  # each pair is a token of its own, with one expert
            weighted = x[:, None] * weights[..., None].astype(x.dtype)  # (T, k, hidden)
            pairs = weighted.flatten(0, 1)
            chosen = experts.reshape(-1, 1)
            y = mx.unflatten(self._outputs(pairs, chosen, experts.shape[1]), 0, experts.shape)
            y = y.sum(axis=(1, 2))
            y = y if residual is None else residual + y
        else:
            y = self._outputs(x, experts)
            weights = weights[:, None].astype(y.dtype)
            y = (weights @ y if residual is None else mx.addmm(residual[:, None], weights, y))[:, 0]
        return y if self.shared is None else self.shared(x, y)

    def _outputs(self, x: mx.array, experts: mx.array, rows_per_token: int = 1) -> mx.array:
        """The outputs of each row's experts, (N, k, hidden).

        Args:
            x: (N, hidden), `rows_per_token` rows for a token of the step.
            experts: (N, k) of each row.
            rows_per_token: see `Routed`.
        """
        num_rows, k = experts.shape
        if experts.size < SORT_FROM:
            return self._run(x[:, None, None], Routed(experts, False, k, rows_per_token))[..., 0, :]
        flat = experts.reshape(-1)
        order = mx.argsort(flat)
        places = mx.argsort(order)
        y = self._run(x[order // k][:, None], Routed(flat[order], True, k, rows_per_token, places))
        return y[:, 0][places].reshape(num_rows, k, -1)  # of (N k, 1, hidden)

    def _run(self, x: mx.array, routed: Routed) -> mx.array:
        return self.down_proj(self.activation(self.gate_up_proj(x, routed)), routed)


@dataclass(slots=True, eq=False)
class GatedExpert:
    """A shared expert; each token weighs its output by itself (Qwen 2 MoE and later)."""

    expert: FeedForward  # (T, hidden) -> (T, hidden)
    gate: Projection  # (T, hidden) -> (T, 1), the weight before its sigmoid

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return self.expert.kernels(model)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        y = mx.sigmoid(self.gate(x)) * self.expert(x)
        return y if residual is None else residual + y


@dataclass(slots=True, eq=False)
class WeighedExpert:
    """A shared expert that counts with one weight for all tokens."""

    expert: FeedForward  # (T, hidden) -> (T, hidden)
    weight: float  # multiplies its output

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return self.expert.kernels(model)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        y = self.weight * self.expert(x)
        return y if residual is None else residual + y


class ExpertChoice:
    """The experts of each token: in plain MLX, or in one kernel where the engine chose it.

    Args:
        bias: (E,) float32 that joins the ranks, where the routing is biased.
        factors: (E,) multiply the weights, each expert's its own; None: nothing does.
        soft_cap: logits become soft_cap * tanh(logit / soft_cap) first; None: they stay.
    """

    __slots__ = ("bias", "factors", "kernel_dtype", "routing", "soft_cap")

    def __init__(
        self,
        routing: Routing,
        bias: mx.array | None = None,
        *,
        factors: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> None:
        assert routing.biased == (bias is not None)
        self.routing = routing
        self.bias = bias
        self.factors = factors
        self.soft_cap = soft_cap
        self.kernel_dtype: mx.Dtype | None = None  # of logits for the kernel; None: plain MLX

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        count = model.num_experts if self.bias is None else self.bias.size  # of this layer
        if not self.routing.has_kernel(count):
            return []
        variant = self.routing.variant(count, model.dtype)

        def install(ready: ReadyFor) -> None:
            self.kernel_dtype = model.dtype if ready(1) else None

        return [KernelUse({ANY_ROWS: [variant]}, install)]

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Router logits (T, E) -> weights (T, k) and experts (T, k)."""
        dtype = self.kernel_dtype
        if self.soft_cap is not None:
            logits = self.soft_cap * mx.tanh(logits.astype(mx.float32) / self.soft_cap)
        choose = route if dtype is not None and logits.dtype == dtype else choose_experts
        weights, experts = choose(logits, self.routing, self.bias)
        return weights if self.factors is None else weights * self.factors[experts], experts


class TokenIds:
    """The ids (T,) of a step's tokens, for choices that read them; the entry sets them."""

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids: mx.array | None = None


@dataclass(slots=True, eq=False)
class HashChoice:
    """The experts of each token follow from its id; their weights from the logits."""

    routing: Routing  # how they are weighed
    table: mx.array  # (vocab, k) int32, the experts of each token of the vocabulary
    tokens: TokenIds  # of the current step

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Router logits (T, E) -> weights (T, k) and experts (T, k)."""
        assert self.tokens.ids is not None
        experts = self.table[self.tokens.ids]
        return weigh_experts(logits, experts, self.routing), experts


def row_indices(x: mx.array) -> mx.array:
    """The index of each row of x (..., 1, dims), (...) uint32.

    Without this argument MLX computes the indices in every product, one operation more.
    """
    return _row_indices(x.shape[:-2])


@lru_cache(64)
def _row_indices(shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.arange(math.prod(shape), dtype=np.uint32).reshape(shape))


class ExpertLinear:
    """Dense matrices, stacked. They may be of a wider dtype than the rows."""

    __slots__ = ("bias", "transposed")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.transposed = weight.swapaxes(-1, -2)  # (E, in_dims, out_dims)
        self.bias = bias  # (E, out_dims)

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        experts, in_order = routed.experts, routed.in_order
        y = mx.gather_mm(x, self.transposed, row_indices(x), experts, sorted_indices=in_order)
        if self.bias is not None:
            y = y + self.bias[experts][..., None, :]
        return y.astype(x.dtype)


class QuantizedExpertLinear(QuantizedMatrix):
    """Quantised matrices, stacked."""

    __slots__ = ()

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            row_indices(x),
            routed.experts,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=routed.in_order,
        )
        return y if self.bias is None else y + self.bias[routed.experts][..., None, :]


@dataclass(slots=True, eq=False)
class FactoredExperts:
    """Expert projections whose outputs each expert multiplies by a number of its own."""

    projection: ExpertProjection  # of the experts
    factors: mx.array  # (E,) float32

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        y = self.projection(x, routed)
        return (y * self.factors[routed.experts][..., None, None]).astype(y.dtype)


class JoinedExperts:
    """Expert projections of the same input, side by side: for formats that cannot be fused."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ExpertProjection]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, sum of out_dims)."""
        return mx.concatenate([part(x, routed) for part in self.parts], axis=-1)
