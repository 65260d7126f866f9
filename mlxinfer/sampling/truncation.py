"""What temperature, top-k, top-p and min-p leave of a row of logits. Draws nothing.

Every cut is a threshold on a value, so equal values stay or go together, and what is kept does not
depend on the order in which a sort puts ties.
"""

from dataclasses import dataclass

import mlx.core as mx

from .blocks import largest_values
from .draw import total_weight

SORTED = 256  # where halving costs more than it saves


@dataclass(frozen=True, slots=True)
class Cuts:
    """The settings of S rows that are drawn; None where no row of them asks for it."""

    temperature: mx.array  # (S, 1) float32, above 0
    min_p: mx.array | None  # (S, 1) float32
    top_p: mx.array | None  # (S, 1) float32, above 1: keeps all
    top_k: mx.array | None  # (S, 1) int32, from 1 to max_k; where given, every row has one
    max_k: int = 0


def kept_weights(rows: mx.array, cuts: Cuts) -> mx.array:
    """Unnormalised probabilities of the tokens that are kept, 0 for the others.

    Args:
        rows: (S, width) float32 logits, padded with -inf.
        cuts: settings of these rows.

    Returns:
        (S, width) float32; the most probable token has exactly 1.
    """
    if cuts.top_k is not None:
        weights = _top_k_weights(rows, cuts, cuts.top_k)
    else:
        weights = _weights(rows, rows.max(axis=-1, keepdims=True), cuts.temperature)
        if cuts.top_p is not None:
            weights = _at_least(_top_p_floor(weights, cuts.top_p), weights)
    return weights if cuts.min_p is None else _at_least(cuts.min_p, weights)


def _weights(rows: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    """exp((row - highest) / temperature); a row that is all -inf gives zeros, not NaN."""
    return mx.exp((rows - mx.maximum(highest, mx.finfo(mx.float32).min)) / temperature)


def _at_least(floor: mx.array, weights: mx.array) -> mx.array:
    return mx.where(weights >= floor, weights, 0.0)


def _top_k_weights(rows: mx.array, cuts: Cuts, top_k: mx.array) -> mx.array:
    """Weights after top-k and, of what that leaves, top-p.

    The k largest values are all that is ever sorted. They are compared as logits: two of them may
    have one weight.
    """
    leading = largest_values(rows, cuts.max_k)  # (S, max_k)
    highest = leading[:, :1]
    kept = rows >= mx.take_along_axis(leading, top_k - 1, axis=-1)
    weights = _weights(mx.where(kept, rows, -mx.inf), highest, cuts.temperature)
    if cuts.top_p is None:
        return weights
    goal = cuts.top_p * total_weight(weights)  # ties with the k-th value have their share in it
    mass = mx.cumsum(_weights(leading, highest, cuts.temperature), axis=-1)  # (S, max_k)
    last = mx.minimum((mass < goal).sum(axis=-1, keepdims=True), top_k - 1)
    return mx.where(rows >= mx.take_along_axis(leading, last, axis=-1), weights, 0.0)


def _top_p_floor(weights: mx.array, top_p: mx.array) -> mx.array:
    """(S, 1) the smallest weight in the smallest set whose mass is at least top_p of the whole.

    Floats that are at least 0 order as the integers of the same bits do, and integers sort faster.
    """
    goal = top_p * total_weight(weights)
    bits = weights.view(mx.int32)
    above = mx.zeros_like(goal)  # mass of the values that are larger than those in `bits`
    # MLX partitions in linear time on the CPU; on a GPU its partition is a sort of the whole row.
    if mx.default_device() == mx.cpu:
        bits, above = _half_that_decides(bits, above, goal)
    rising = mx.sort(bits, axis=-1).view(mx.float32)
    mass = above + mx.cumsum(rising, axis=-1, reverse=True)  # of this value and all larger ones
    num_enough = (mass >= goal).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(rising, mx.maximum(num_enough, 1) - 1, axis=-1)


def _half_that_decides(
    bits: mx.array, above: mx.array, goal: mx.array
) -> tuple[mx.array, mx.array]:
    """Halve the values, again and again, to the half in which the mass from the top meets `goal`.

    What quickselect does, but for a mass and with the same shapes for all rows: each row goes on
    with its upper half where that and what lies above it is enough, else with its lower one.

    Args:
        bits: (S, width) int32, bits of floats that are at least 0.
        above: (S, 1) float32 mass of larger values.
        goal: (S, 1) float32

    Returns:
        (S, at most SORTED) bits and their (S, 1) `above`.
    """
    width = bits.shape[-1]
    halvings = max(0, (width - 1) // SORTED).bit_length()
    bits = mx.pad(bits, [(0, 0), (0, -width % (1 << halvings))])  # weights of 0 change no mass
    for _ in range(halvings):
        half = bits.shape[-1] // 2
        parted = mx.partition(bits, half, axis=-1)
        lower, upper = parted[:, :half], parted[:, half:]
        mass = above + mx.cumsum(upper.view(mx.float32), axis=-1)[:, -1:]
        enough = mass >= goal
        bits = mx.where(enough, upper, lower)
        above = mx.where(enough, above, mass)
    return bits, above
