"""Parts that cut off tokens: top-n-sigma, typical sampling, top-k, top-p, min-p and XTC.

Each function is a part as `rows.Part` describes it: it gives -inf to the tokens that are not kept,
and draws none. Every cut but the quantile of typical sampling is a threshold on a value, so equal
values stay or go together, and the result does not depend on the order in which a sort puts ties.
"""

import mlx.core as mx
import numpy as np

from ..core import SamplingParams
from .draw import largest_values, padded_width, total_weight, uniforms
from .rows import Part, PartRows, Turn

SORTED = 256  # where halving costs more than it saves
K_STEP = 64  # top_k is rounded up to this: whole vectors, and few shapes
KEEP_ALL = 2.0  # a top_p that no mass reaches, whatever the rounding
TINY = 1e-30  # in place of temperatures above 0 that would be 0 in float32
LOWEST = mx.finfo(mx.float32).min
EXCLUDING = np.uint64(0x3C6EF372FE94F82B)  # XTC has a stream of random numbers of its own
# Of two allowed tokens the lower one lies exactly two deviations below the higher: without a
# margin the last bit of a sum would decide, which depends on what shares the step.
SIGMA_MARGIN = 1e-4


def temperatures(rows: PartRows) -> mx.array:
    """(P, 1) float32, above 0."""
    return mx.array([max(t, TINY) for t in rows.settings("temperature")], mx.float32)[:, None]


def weights_of(logits: mx.array, temperature: mx.array) -> mx.array:
    """(P, width) unnormalised probabilities: the most probable token has exactly 1.

    A row that is all -inf gives zeros, not NaN.
    """
    return _weights(logits, logits.max(axis=-1, keepdims=True), temperature)


def _weights(logits: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    return mx.exp((logits - mx.maximum(highest, LOWEST)) / temperature)


def top_n_sigma(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Keep logits within n standard deviations of the highest, over tokens above -inf.

    Tang et al., "Top-nσ: Not all logits are you need", 2024.
    """
    there = logits > -mx.inf
    count = mx.maximum(total_weight(there.astype(mx.float32)), 1.0)
    mean = total_weight(mx.where(there, logits, 0.0)) / count
    away = mx.where(there, logits - mean, 0.0)
    sigma = mx.sqrt(total_weight(away * away) / count)
    reach = (rows.column("top_n_sigma") + SIGMA_MARGIN) * sigma
    return mx.where(logits >= logits.max(axis=-1, keepdims=True) - reach, logits, -mx.inf)


def typical(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Keep the tokens with a surprise nearest the entropy, up to a mass.

    Meister et al., "Locally typical sampling", 2022. Equally typical tokens stay or go together.
    """
    highest = mx.maximum(logits.max(axis=-1, keepdims=True), LOWEST)
    scaled = (logits - highest) / rows.once(temperatures)
    weights = mx.exp(scaled)
    total = total_weight(weights)
    surprise = mx.log(total) - scaled  # of each token; inf where it has no mass
    share = weights / total
    entropy = total_weight(mx.where(share > 0, share * surprise, 0.0))
    away = mx.where(share > 0, mx.abs(surprise - entropy), mx.inf)
    order = mx.argsort(away, axis=-1)
    mass = mx.cumsum(mx.take_along_axis(share, order, axis=-1), axis=-1)
    count = (mass < rows.column("typical_p")).sum(axis=-1, keepdims=True)  # that are not enough
    last = mx.take_along_axis(order, mx.minimum(count, logits.shape[-1] - 1), axis=-1)
    kept = (away <= mx.take_along_axis(away, last, axis=-1)) & (share > 0)
    return mx.where(kept, logits, -mx.inf)


def top_k(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Keep the k highest logits and, of those, the smallest set that reaches top-p.

    The k highest are all that is sorted. They are compared as logits: two of them may have one
    weight.
    """
    max_k, kth = rows.once(_ranks)
    leading = largest_values(logits, max_k)  # (P, max_k), rising
    floor, goals = mx.take_along_axis(leading, kth, axis=-1), rows.once(_top_ps)
    if goals is not None:
        weights = _weights(leading, leading[:, -1:], rows.once(temperatures))
        above = mx.cumsum(mx.where(leading > floor, weights, 0.0), axis=-1)[:, -1:]
        ties = (logits == floor).sum(axis=-1, keepdims=True)  # with the k-th; all have a share
        goal = goals * (above + ties * mx.take_along_axis(weights, kth, axis=-1))
        lowest = mx.maximum(_lowest_enough(_mass_above(weights), goal), kth)
        floor = mx.take_along_axis(leading, lowest, axis=-1)
    return mx.where(logits >= floor, logits, -mx.inf)


def _ranks(rows: PartRows) -> tuple[int, mx.array]:
    """How many of the highest values to sort, and the column (P, 1) of the k-th among them."""
    ks = np.array(rows.settings("top_k"), dtype=np.int32)
    max_k = min(-(-int(ks.max()) // K_STEP) * K_STEP, padded_width(rows.spare))
    return max_k, mx.array((max_k - ks)[:, None])


def _top_ps(rows: PartRows) -> mx.array | None:
    """(P, 1) float32 top-p, where it is off more than any mass; None: it is off in all rows."""
    top_ps = np.array(rows.settings("top_p"), dtype=np.float32)  # 1 - 1e-12 is 1, and so off
    found = np.where(top_ps < 1, top_ps, np.float32(KEEP_ALL))
    return mx.array(found[:, None]) if (top_ps < 1).any() else None


def top_p(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Keep the smallest set of the most probable tokens that reaches a mass of top-p."""
    weights = weights_of(logits, rows.once(temperatures))
    return mx.where(weights >= _top_p_floor(weights, rows.column("top_p")), logits, -mx.inf)


def min_p(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Keep tokens that are at least so many times as probable as the most probable one."""
    highest = logits.max(axis=-1, keepdims=True)
    reach = rows.once(temperatures) * mx.log(rows.column("min_p"))  # at most 0
    return mx.where(logits >= highest + reach, logits, -mx.inf)


def xtc(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """With a probability at each token, exclude all that reach a threshold but the least probable.

    P. E. Weidmann, "Exclude top choices", text-generation-webui, pull request 6335, 2024.
    """
    weights = weights_of(logits, rows.once(temperatures))
    there = weights > 0
    likely = there & (weights >= rows.column("xtc_threshold") * total_weight(weights))
    least = mx.where(likely, weights, mx.inf).min(axis=-1, keepdims=True)
    streams = np.array([slot.stream for slot in rows.slots], dtype=np.uint64)
    random = uniforms(streams ^ EXCLUDING, turn.counts)
    chance = np.array(rows.settings("xtc_probability"), dtype=np.float32)
    now = mx.array((random < chance)[:, None])
    return mx.where(there & ~(now & likely & (weights > least)), logits, -mx.inf)


def _top_p_floor(weights: mx.array, top_p: mx.array) -> mx.array:
    """(P, 1) the smallest weight in the smallest set with at least top_p of the whole mass.

    Floats that are at least 0 order as the integers of the same bits do, and integers sort faster.
    """
    goal = top_p * total_weight(weights)
    bits, above = weights.view(mx.int32), None
    # MLX partitions in linear time on the CPU; on a GPU its partition is a sort of the whole row.
    if mx.default_device() == mx.cpu:
        bits, above = _half_that_decides(bits, goal)
    rising = mx.sort(bits, axis=-1).view(mx.float32)
    mass = _mass_above(rising)
    mass = mass if above is None else above + mass
    return mx.take_along_axis(rising, _lowest_enough(mass, goal), axis=-1)


def _mass_above(rising: mx.array) -> mx.array:
    """(P, n) values that rise -> (P, n - 1) mass of each but the first and of all behind it."""
    return mx.cumsum(rising, axis=-1, reverse=True)[:, 1:]


def _lowest_enough(mass: mx.array, goal: mx.array) -> mx.array:
    """(P, 1) column of the lowest value with a mass, of _mass_above, of at least `goal`.

    Column 0 where no mass is: the lowest value comes when no other is left, whatever its own.
    """
    return (mass >= goal).sum(axis=-1, keepdims=True)


def _half_that_decides(bits: mx.array, goal: mx.array) -> tuple[mx.array, mx.array | None]:
    """Halve the values, again and again, to the half in which the mass from the top meets `goal`.

    This is quickselect for a mass, with the same shapes for all rows. A row keeps its upper half
    where the mass from there up is enough, else its lower half.

    Args:
        bits: (P, width) int32, bits of floats that are at least 0.
        goal: (P, 1) float32

    Returns:
        (P, at most SORTED) bits and the (P, 1) float32 mass of larger values; None: there are none.
    """
    width, above = bits.shape[-1], None
    halvings = max(0, (width - 1) // SORTED).bit_length()
    padding = -width % (1 << halvings)
    if padding:
        bits = mx.pad(bits, [(0, 0), (0, padding)])  # weights of 0 change no mass
    for _ in range(halvings):
        lower, upper = mx.split(mx.partition(bits, bits.shape[-1] // 2, axis=-1), 2, axis=-1)
        mass = mx.cumsum(upper.view(mx.float32), axis=-1)[:, -1:]
        mass = mass if above is None else above + mass
        enough = mass >= goal
        bits = mx.where(enough, upper, lower)
        above = mx.where(enough, 0.0 if above is None else above, mass)
    return bits, above


def _has_top_p(params: SamplingParams) -> bool:
    return float(np.float32(params.top_p)) < 1  # 1 - 1e-12 is 1, and so off


# In the order of their work. A new sampler is a function and a row here.
CUTS = (
    Part(top_n_sigma, lambda p: p.top_n_sigma > 0 and not p.greedy),
    Part(typical, lambda p: p.typical_p < 1 and not p.greedy),
    Part(top_k, lambda p: p.top_k > 0 and not p.greedy, fused=True),
    Part(top_p, lambda p: _has_top_p(p) and not (p.top_k or p.greedy), fused=True),
    Part(min_p, lambda p: p.min_p > 0 and not p.greedy, fused=True),
    Part(xtc, lambda p: p.xtc_probability > 0 and not p.greedy),
)
