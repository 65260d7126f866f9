"""The experts of each token and their weights, in one dispatch, and its plain-MLX twin.

T = tokens, E = experts, k = experts of a token. Knows no experts' matrices and no layer.

A token goes to the k experts of the largest ranks, largest first; of equal ranks the first expert
counts. Ranks are the logits, or their sigmoids plus a bias of each expert. Weights are the softmax
over all experts, or the sigmoids, of the chosen experts. Normalised weights are divided by their
sum. All is computed in float32 and rounded once.
"""

import math
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .launch import Launch, MetalKernel
from .variants import IN_MLX, Case, Form, Kind, Variant, dtype_name, launch_of

LANES = 32
ROUTERS = 4  # SIMD groups of a threadgroup, one token each
MAX_EXPERTS = 512  # 16 ranks a lane
SUM_EPS = 1e-20  # that DeepSeek adds to the sum of weights
ROUNDING = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}  # of weights below 1, or factor


@dataclass(frozen=True, slots=True, eq=False)
class Routing(Form):
    """The rule by which experts are chosen and weighed.

    Attributes:
        k: experts of a token.
        sigmoid: scores are sigmoids of the logits; else a softmax over all.
        root_softplus: scores are the roots of softplus instead. The kernel has no such scores.
        ranks_logits: the bias joins the logits, not the scores. The kernel has no such ranks.
        normalised: weights are divided by their sum.
        biased: a bias of each expert joins its rank.
        eps: added to the sum that weights are divided by.
        factor: multiplies the weights.
        num_groups, num_best: experts stand in groups of equally many, side by side, and only those
            of the best groups may be chosen (DeepSeek-V2 and V3). The kernel has no groups.
        counted: best ranks of a group whose sum is its worth.
    """

    k: int
    sigmoid: bool = False
    normalised: bool = False
    biased: bool = False
    eps: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    num_best: int = 1
    counted: int = 1
    root_softplus: bool = False
    ranks_logits: bool = False

    def has_kernel(self, num_experts: int) -> bool:
        if self.num_best < self.num_groups or (self.biased and not self.sigmoid):
            return False
        if self.root_softplus or self.ranks_logits:
            return False
        return self.k <= min(num_experts, LANES) and num_experts <= MAX_EXPERTS

    def variant(self, num_experts: int, dtype: mx.Dtype) -> Variant:
        return Variant.from_form("routing", self, experts=num_experts, dtype=dtype_name(dtype))

    def launch(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Launch:
        """The call for logits of a shape (T, E)."""
        num_tokens, num_experts = shape
        assert self.has_kernel(num_experts), (shape, self)
        return Launch(
            _kernel(self),
            template=[
                ("T", dtype),
                ("EXPERTS", num_experts),
                ("K", self.k),
                ("SIGMOID", self.sigmoid),
                ("NORMALISED", self.normalised),
            ],
            grid=(num_tokens * LANES, 1, 1),
            threadgroup=(min(ROUTERS, num_tokens) * LANES, 1, 1),
            output_shapes=[(num_tokens, self.k)] * 2,
            output_dtypes=[dtype, mx.uint32],
        )


def choose_experts(
    logits: mx.array, routing: Routing, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The same as `route` in MLX's own operations; experts come in any order.

    Where ranks are logits, only the chosen ones are weighed.
    """
    k, grouped = routing.k, routing.num_best < routing.num_groups
    summed = routing.normalised and (routing.sigmoid or routing.root_softplus)
    if summed or routing.eps or routing.factor != 1 or bias is not None or grouped:
        return _choose_among_all(logits.astype(mx.float32), routing, bias)
    chosen_alone = routing.sigmoid or routing.normalised
    ranks = logits if chosen_alone else mx.softmax(logits, axis=-1, precise=True)
    experts = mx.argpartition(ranks, kth=-k, axis=-1)[:, -k:]
    chosen = mx.take_along_axis(ranks, experts, axis=-1)
    if routing.sigmoid:
        return mx.sigmoid(chosen.astype(mx.float32)), experts
    return mx.softmax(chosen, axis=-1, precise=True) if chosen_alone else chosen, experts


def _choose_among_all(
    logits: mx.array, routing: Routing, bias: mx.array | None
) -> tuple[mx.array, mx.array]:
    k, scores = routing.k, _scores(logits, routing)
    ranks = logits if routing.ranks_logits else scores
    ranks = ranks if bias is None else ranks + bias
    if routing.num_best < routing.num_groups:
        ranks = _of_best_groups(ranks, routing)
    experts = mx.argpartition(ranks, kth=-k, axis=-1)[:, -k:]
    return _weighed(scores, experts, routing), experts


def _of_best_groups(ranks: mx.array, routing: Routing) -> mx.array:
    """Ranks (T, E), -inf outside of each token's best groups."""
    grouped = mx.unflatten(ranks, -1, (routing.num_groups, -1))  # (T, G, E / G)
    best = mx.topk(grouped, routing.counted, axis=-1)
    worth = mx.sum(best, axis=-1, keepdims=True)  # (T, G, 1)
    num_worse = routing.num_groups - routing.num_best
    worse = mx.argpartition(worth, kth=num_worse - 1, axis=1)[:, :num_worse]
    masked = mx.put_along_axis(grouped, worse, mx.array(-mx.inf), axis=1)
    return masked.flatten(1)


def route(
    logits: mx.array, routing: Routing, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One dispatch.

    Args:
        logits: (T, E) float32, float16 or bfloat16.
        bias: (E,) float32, where the routing is biased.

    Returns:
        Weights (T, k) in the dtype of the logits, and experts (T, k) uint32.
    """
    inputs = [logits] if bias is None else [logits, bias]
    weights, experts = launch_of(routing, logits.shape, logits.dtype)(inputs)
    return weights, experts


def route_twin(
    logits: mx.array, routing: Routing, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    wide = logits.astype(mx.float32)
    ranks = wide if bias is None else mx.sigmoid(wide) + bias
    experts = mx.argsort(-ranks, axis=-1)[:, : routing.k].astype(mx.uint32)
    return _weighed(_scores(wide, routing), experts, routing).astype(logits.dtype), experts


def _scores(logits: mx.array, routing: Routing) -> mx.array:
    if routing.root_softplus:
        return mx.sqrt(mx.logaddexp(logits, 0.0))
    return mx.sigmoid(logits) if routing.sigmoid else mx.softmax(logits, axis=-1)


def weigh_experts(logits: mx.array, experts: mx.array, routing: Routing) -> mx.array:
    """The weights (T, k) float32 of experts (T, k) that something else chose."""
    return _weighed(_scores(logits.astype(mx.float32), routing), experts, routing)


def _weighed(scores: mx.array, experts: mx.array, routing: Routing) -> mx.array:
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if routing.normalised:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + routing.eps)
    return weights * routing.factor


@cache
def _kernel(routing: Routing) -> MetalKernel:
    bias = "bias" if routing.biased else "logits"
    return MetalKernel(
        name="routing",
        inputs=("logits", "bias") if routing.biased else ("logits",),
        outputs=("weights", "experts"),
        body=f"""
            route<EXPERTS, K, SIGMOID, NORMALISED, {str(routing.biased).lower()}>(
                logits, {bias}, {float(routing.eps)!r}f, {float(routing.factor)!r}f,
                weights, experts,
                thread_position_in_grid.x / 32, thread_index_in_simdgroup);
        """,
    )


def _inputs(variant: Variant, tokens: int) -> tuple[mx.array, Routing, mx.array | None]:
    """Logits that are distinct also in 16 bits, and near 1."""
    routing = variant.form
    count, rng = variant.number("experts"), np.random.default_rng(tokens)
    steps = rng.permuted(np.tile(np.arange(count), (tokens, 1)), axis=1) - count // 2
    logits = mx.array((steps / 64).astype(np.float32)).astype(variant.dtype)
    if not routing.biased:
        return logits, routing, None
    bias = mx.array(rng.permutation(count).astype(np.float32) * 4)  # outweighs every sigmoid
    return logits, routing, bias


def _case(variant: Variant) -> Case:
    """Experts in a known order, then pairs of equal ones, and scores as small as epsilon."""
    steps = [_inputs(variant, tokens) for tokens in (1, 6)]
    pairs, order = _equal_pairs(variant)
    rounding = ROUNDING[str(variant["dtype"])] * max(1.0, variant.form.factor)

    def in_order() -> list[mx.array]:
        scores = _scores(pairs[0].astype(mx.float32), variant.form)
        return [_weighed(scores, order, variant.form).astype(variant.dtype), order]

    return Case(
        lambda: [array for step in (*steps, pairs) for array in route(*step)],
        lambda: [*(array for step in steps for array in route_twin(*step)), *in_order()],
        (rounding, 0.0) * (len(steps) + 1),
    )


def _equal_pairs(variant: Variant) -> tuple[tuple[mx.array, Routing, mx.array | None], mx.array]:
    """Each expert as good as another, and the best of all tokens (2, k): of equal ones the first.

    Some pairs have one lane, 32 experts apart, and some are neighbours.
    Biases decide where there are any; then scores of the second token are next to epsilon.
    """
    routing, count = variant.form, variant.number("experts")
    expert = np.arange(count)
    one_lane = (expert // 64 % 2 == 0) & ((expert % 64 >= LANES) | (expert + LANES < count))
    pair = np.where(one_lane, expert // 64 * 64 + expert % LANES, count + expert // 2)
    _, place = np.unique(pair, return_inverse=True)
    num_pairs = int(place.max()) + 1
    worth = np.random.default_rng(0).permutation(num_pairs)[place]
    best = np.argsort(-worth, kind="stable")[: routing.k].astype(np.uint32)
    if not routing.biased:
        logits, bias = np.tile((worth - num_pairs // 2) / 32, (2, 1)), None
    else:
        faint = math.log(routing.eps) if routing.eps else 0.0
        logits, bias = np.repeat([[0.0], [faint]], count, 1), mx.array(4 * worth, mx.float32)
    given = mx.array(logits.astype(np.float32)).astype(variant.dtype)
    return (given, routing, bias), mx.array(np.tile(best, (2, 1)))


def _timed(variant: Variant, sequences: int, _: int) -> Case:
    call = _inputs(variant, sequences)
    rounding = ROUNDING[str(variant["dtype"])] * max(1.0, variant.form.factor)
    return Case(
        lambda: [*route(*call)],
        lambda: [*route_twin(*call)],
        (rounding, 0.0),
        instead={IN_MLX: lambda: [*choose_experts(*call)]},
    )


ROUTING = Kind(
    name="routing",
    files=("routing.metal", "routing.py"),
    case=_case,
    timed=_timed,
    registers=lambda variant: 14 + (variant.number("experts") + 31) // 32,
    samples=(
        Routing(8, normalised=True).variant(128, mx.bfloat16),
        Routing(8, sigmoid=True, normalised=True, biased=True, eps=1e-20).variant(256, mx.bfloat16),
        Routing(6, factor=16.0).variant(160, mx.bfloat16),
    ),
)
