"""The experts of each token and their weights, in one dispatch, and its plain-MLX twin.

T = tokens, E = experts, k = experts of a token. Knows no experts' matrices and no layer.

A token goes to the k experts of the largest ranks, of equal ones the first, largest first. Ranks
are the logits, or their sigmoids plus a bias of each expert. Weights are the softmax over all
experts, or the sigmoids, of those that were chosen; normalised, they are divided by their sum.
Computed in float32 and rounded once.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from .launch import Launch, MetalKernel
from .variants import Case, Kind, Variant, dtype_name

LANES = 32
ROUTERS = 4  # SIMD groups of a threadgroup, one token each
MAX_EXPERTS = 512  # 16 ranks a lane
MAX_LAUNCHES = 64  # that are remembered: a decode step makes the same in every layer
ROUNDING = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}  # of weights below 1, or factor


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How experts are chosen and weighed.

    From `routing_of`: layers look up launches by the object.

    Attributes:
        k: experts of a token, up to 32.
        sigmoid: scores are sigmoids of the logits; else a softmax over all.
        normalised: weights are divided by their sum.
        biased: a bias of each expert joins its rank; of sigmoids alone.
        eps: added to the sum that weights are divided by.
        factor: multiplies the weights.
    """

    k: int
    sigmoid: bool
    normalised: bool
    biased: bool = False
    eps: float = 0.0
    factor: float = 1.0


_routing = cache(Routing)


def routing_of(
    k: int,
    *,
    sigmoid: bool,
    normalised: bool,
    biased: bool = False,
    eps: float = 0.0,
    factor: float = 1.0,
) -> Routing:
    """The same object for the same values."""
    return _routing(k, sigmoid, normalised, biased, float(eps), float(factor))


def has_experts(num_experts: int, routing: Routing) -> bool:
    """Whether the kernel takes so many."""
    return routing.k <= min(num_experts, LANES) and num_experts <= MAX_EXPERTS


def route(
    logits: mx.array, routing: Routing, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One dispatch.

    Args:
        logits: (T, E) float32, float16 or bfloat16.
        routing: how.
        bias: (E,) float32, where the routing is biased.

    Returns:
        Weights (T, k) in the dtype of the logits, and experts (T, k) uint32.
    """
    inputs = [logits] if bias is None else [logits, bias]
    weights, experts = _launch(routing, logits.shape, logits.dtype)(inputs)
    return weights, experts


def route_twin(
    logits: mx.array, routing: Routing, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The same in plain MLX."""
    wide = logits.astype(mx.float32)
    ranks = wide if bias is None else mx.sigmoid(wide) + bias
    experts = mx.argsort(-ranks, axis=-1)[:, : routing.k].astype(mx.uint32)
    return _weighed(wide, experts, routing).astype(logits.dtype), experts


def _weighed(logits: mx.array, experts: mx.array, routing: Routing) -> mx.array:
    scores = mx.sigmoid(logits) if routing.sigmoid else mx.softmax(logits, axis=-1)
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if routing.normalised:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + routing.eps)
    return weights * routing.factor


@lru_cache(MAX_LAUNCHES)
def _launch(routing: Routing, shape: tuple[int, ...], dtype: mx.Dtype) -> Launch:
    num_tokens, num_experts = shape
    assert has_experts(num_experts, routing), (shape, routing)
    return Launch(
        _kernel(routing),
        template=[
            ("T", dtype),
            ("EXPERTS", num_experts),
            ("K", routing.k),
            ("SIGMOID", routing.sigmoid),
            ("NORMALISED", routing.normalised),
        ],
        grid=(num_tokens * LANES, 1, 1),
        threadgroup=(min(ROUTERS, num_tokens) * LANES, 1, 1),
        output_shapes=[(num_tokens, routing.k)] * 2,
        output_dtypes=[dtype, mx.uint32],
    )


@cache
def _kernel(routing: Routing) -> MetalKernel:
    bias = "bias" if routing.biased else "logits"
    return MetalKernel(
        name="routing",
        inputs=("logits", "bias") if routing.biased else ("logits",),
        outputs=("weights", "experts"),
        body=f"""
            route<EXPERTS, K, SIGMOID, NORMALISED, {str(routing.biased).lower()}>(
                logits, {bias}, {routing.eps!r}f, {routing.factor!r}f, weights, experts,
                thread_position_in_grid.x / 32, thread_index_in_simdgroup);
        """,
    )


def routing_variant(routing: Routing, num_experts: int, dtype: mx.Dtype) -> Variant:
    """What `route` compiles."""
    return Variant.of(
        "routing",
        dtype=dtype_name(dtype),
        experts=num_experts,
        k=routing.k,
        sigmoid=routing.sigmoid,
        normalised=routing.normalised,
        biased=routing.biased,
        eps=repr(routing.eps) if routing.eps else "",
        factor="" if routing.factor == 1 else repr(routing.factor),
    )


def _inputs(variant: Variant, tokens: int) -> tuple[mx.array, Routing, mx.array | None]:
    routing = routing_of(
        variant.number("k"),
        sigmoid=bool(variant["sigmoid"]),
        normalised=bool(variant["normalised"]),
        biased=bool(variant["biased"]),
        eps=float(str(variant["eps"]) or 0),
        factor=float(str(variant["factor"]) or 1),
    )
    count, rng = variant.number("experts"), np.random.default_rng(tokens)
    # Distinct also in 16 bits, and near 1: the order of equal experts is not MLX's to say.
    steps = rng.permuted(np.tile(np.arange(count), (tokens, 1)), axis=1) - count // 2
    logits = mx.array((steps / 64).astype(np.float32)).astype(variant.dtype)
    if not routing.biased:
        return logits, routing, None
    bias = mx.array(rng.permutation(count).astype(np.float32) * 4)  # outweighs every sigmoid
    return logits, routing, bias


def _case(variant: Variant) -> Case:
    steps = [_inputs(variant, tokens) for tokens in (1, 6)]
    rounding = ROUNDING[str(variant["dtype"])] * max(1.0, steps[0][1].factor)
    return Case(
        lambda: [array for step in steps for array in route(*step)],
        lambda: [array for step in steps for array in route_twin(*step)],
        (rounding, 0.0) * len(steps),
    )


def _timed(variant: Variant, sequences: int, _: int) -> Case:
    call = _inputs(variant, sequences)
    return Case(lambda: [*route(*call)], lambda: [*_in_layers(*call)], ())


def _in_layers(
    logits: mx.array, routing: Routing, bias: mx.array | None
) -> tuple[mx.array, mx.array]:
    """What layers do without the kernel: where they can, only what was chosen is weighed."""
    simple = not routing.biased and routing.eps == 0 and routing.factor == 1
    if not simple:
        return _weighed_of_all(logits.astype(mx.float32), routing, bias)
    chosen_alone = routing.sigmoid or routing.normalised
    ranks = logits if chosen_alone else mx.softmax(logits, axis=-1, precise=True)
    experts = mx.argpartition(ranks, kth=-routing.k, axis=-1)[:, -routing.k :]
    chosen = mx.take_along_axis(ranks, experts, axis=-1)
    if routing.sigmoid:
        return mx.sigmoid(chosen.astype(mx.float32)), experts
    return mx.softmax(chosen, axis=-1, precise=True) if chosen_alone else chosen, experts


def _weighed_of_all(
    logits: mx.array, routing: Routing, bias: mx.array | None
) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits) if routing.sigmoid else mx.softmax(logits, axis=-1)
    ranks = scores if bias is None else scores + bias
    experts = mx.argpartition(ranks, kth=-routing.k, axis=-1)[:, -routing.k :]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if routing.normalised:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + routing.eps)
    return weights * routing.factor, experts


def _sample(routing: Routing, num_experts: int) -> Variant:
    return routing_variant(routing, num_experts, mx.bfloat16)


ROUTING = Kind(
    name="routing",
    files=("routing.metal", "routing.py"),
    case=_case,
    timed=_timed,
    registers=lambda variant: 14 + (variant.number("experts") + 31) // 32,
    samples=(
        _sample(routing_of(8, sigmoid=False, normalised=True), 128),
        _sample(routing_of(8, sigmoid=True, normalised=True, biased=True, eps=1e-20), 256),
        _sample(routing_of(6, sigmoid=False, normalised=False, factor=16.0), 160),
    ),
)
