"""What temperature, top-k, top-p and min-p leave of a row of logits. Draws nothing.

Every cut is a threshold on a value, so equal values stay or go together, and what is kept does not
depend on the order in which a sort puts ties.
"""

from dataclasses import dataclass

import mlx.core as mx

from .draw import largest_values, total_weight

SORTED = 256  # where halving costs more than it saves
LOWEST = mx.finfo(mx.float32).min


@dataclass(frozen=True, slots=True)
class WeightCuts:
    """The settings of W rows without top-k: first N that have no top-p, then T that have."""

    temperature: mx.array  # (W, width) float32, above 0
    floor: mx.array | None  # (N, 1) float32 min-p of the former; None: N is 0, or nothing is cut
    top_p: mx.array | None  # (T, 1) float32
    min_p: mx.array | None  # (T, 1) float32 of the latter; None: no row of them asks for it


@dataclass(frozen=True, slots=True)
class RankCuts:
    """The settings of K rows with top-k."""

    temperature: mx.array  # (K, width) float32, above 0
    max_k: int
    kth: mx.array  # (K, 1) int32 column, of max_k values that rise, from which top-k keeps
    top_p: mx.array | None  # (K, 1) float32, above 1: keeps all; None: no row asks for it
    min_p: mx.array | None  # (K, 1) float32


def kept_weights(
    rows: mx.array, by_weight: WeightCuts | None, by_rank: RankCuts | None
) -> mx.array:
    """Unnormalised probabilities of the tokens that are kept, 0 for the others.

    Args:
        rows: (W + K, width) float32 logits, padded with -inf.
        by_weight: settings of the first W rows; None: W is 0.
        by_rank: settings of the last K rows; None: K is 0.

    Returns:
        (W + K, width) float32; the most probable token has exactly 1.
    """
    if by_weight is None:
        assert by_rank is not None
        return _kept_by_rank(rows, by_rank)
    if by_rank is None:
        return _kept_by_weight(rows, by_weight)
    first, last = mx.split(rows, [len(rows) - len(by_rank.kth)])
    return mx.concatenate([_kept_by_weight(first, by_weight), _kept_by_rank(last, by_rank)])


def _weights(rows: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    """exp((row - highest) / temperature); a row that is all -inf gives zeros, not NaN."""
    return mx.exp((rows - mx.maximum(highest, LOWEST)) / temperature)


def _at_least(floor: mx.array, weights: mx.array) -> mx.array:
    return mx.where(weights >= floor, weights, 0.0)


def _kept_by_weight(rows: mx.array, cuts: WeightCuts) -> mx.array:
    """(W, width) weights after top-p and min-p: both are one floor."""
    weights = _weights(rows, rows.max(axis=-1, keepdims=True), cuts.temperature)
    floors = [] if cuts.floor is None else [cuts.floor]
    if cuts.top_p is not None:
        floor = _top_p_floor(weights[len(rows) - len(cuts.top_p) :], cuts.top_p)
        floors.append(floor if cuts.min_p is None else mx.maximum(floor, cuts.min_p))
    return _at_least(mx.concatenate(floors), weights) if floors else weights


def _kept_by_rank(rows: mx.array, cuts: RankCuts) -> mx.array:
    """(K, width) weights after top-k and, of what that leaves, top-p, and then min-p.

    The k largest values are all that is ever sorted. They are compared as logits: two of them may
    have one weight.
    """
    leading = largest_values(rows, cuts.max_k)  # (K, max_k)
    highest = leading[:, -1:]
    kept = rows >= mx.take_along_axis(leading, cuts.kth, axis=-1)
    weights = _weights(mx.where(kept, rows, -mx.inf), highest, cuts.temperature)
    if cuts.top_p is not None:
        goal = cuts.top_p * total_weight(weights)  # ties with the k-th value have a share in it
        mass = _mass_above(_weights(leading, highest, cuts.temperature[:, : cuts.max_k]))
        lowest = mx.maximum(_lowest_enough(mass, goal), cuts.kth)
        kept = rows >= mx.take_along_axis(leading, lowest, axis=-1)
        weights = mx.where(kept, weights, 0.0)
    return weights if cuts.min_p is None else _at_least(cuts.min_p, weights)


def _top_p_floor(weights: mx.array, top_p: mx.array) -> mx.array:
    """(S, 1) the smallest weight in the smallest set with at least top_p of the whole mass.

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
    """(S, n) values that rise -> (S, n - 1) mass of each but the first and of all behind it."""
    return mx.cumsum(rising, axis=-1, reverse=True)[:, 1:]


def _lowest_enough(mass: mx.array, goal: mx.array) -> mx.array:
    """(S, 1) column of the lowest value with a mass, of _mass_above, of at least `goal`.

    Column 0 where no mass is: the lowest value comes when no other is left, whatever its own.
    """
    return (mass >= goal).sum(axis=-1, keepdims=True)


def _half_that_decides(bits: mx.array, goal: mx.array) -> tuple[mx.array, mx.array | None]:
    """Halve the values, again and again, to the half in which the mass from the top meets `goal`.

    What quickselect does, but for a mass and with the same shapes for all rows: each row goes on
    with its upper half where that and what lies above it is enough, else with its lower one.

    Args:
        bits: (S, width) int32, bits of floats that are at least 0.
        goal: (S, 1) float32

    Returns:
        (S, at most SORTED) bits and the (S, 1) float32 mass of larger values; None: there are none.
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
