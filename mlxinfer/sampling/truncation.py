"""What temperature, top-k, top-p and min-p leave of a row of logits. Draws nothing.

Every cut is a threshold on a value, so equal values stay or go together, and what is kept does not
depend on the order in which a sort puts ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .blocks import largest_values
from .draw import total_weight

SORTED = 256  # where halving costs more than it saves
LOWEST = mx.finfo(mx.float32).min


@dataclass(frozen=True, slots=True)
class Cuts:
    """The settings of S neighbouring rows; None where no row of them asks for it."""

    rows: slice  # among all that are drawn
    temperature: mx.array  # (S, 1) float32, above 0
    min_p: mx.array | None  # (S, 1) float32
    top_p: mx.array | None  # (S, 1) float32, above 1: keeps all
    kth: mx.array | None  # (S, 1) int32 column, of max_k values that rise, from which top-k keeps
    max_k: int = 0  # 0: no row has a top-k, else every row has one

    @property
    def keeps_all(self) -> bool:
        """Whether no row is cut."""
        return self.min_p is None and self.top_p is None and self.kth is None


def kept_weights(rows: mx.array, temperature: mx.array, groups: Sequence[Cuts]) -> mx.array:
    """Unnormalised probabilities of the tokens that are kept, 0 for the others.

    Args:
        rows: (D, width) float32 logits, padded with -inf.
        temperature: (D, 1) or (D, width) float32, above 0.
        groups: settings of these rows, group after group; only the last may have a top-k.

    Returns:
        (D, width) float32; the most probable token has exactly 1.
    """
    last = groups[-1]
    leading = largest_values(rows[last.rows], last.max_k) if last.max_k else None
    weights = _weights(rows, _highest(rows, leading), temperature)
    if all(cuts.keeps_all for cuts in groups):
        return weights
    kept = [
        _kept_by_weight(weights[cuts.rows], cuts)
        if leading is None or cuts.kth is None
        else _kept_by_rank(rows[cuts.rows], weights, leading, cuts, cuts.kth)
        for cuts in groups
    ]
    return mx.where(mx.concatenate(kept), weights, 0.0)


def _highest(rows: mx.array, leading: mx.array | None) -> mx.array:
    """(D, 1) the largest value of each row; of the last rows the `leading` ones are known."""
    if leading is None:
        return rows.max(axis=-1, keepdims=True)
    num_unknown = len(rows) - len(leading)
    known = leading[:, -1:]
    if not num_unknown:
        return known
    return mx.concatenate([rows[:num_unknown].max(axis=-1, keepdims=True), known])


def _weights(rows: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    """exp((row - highest) / temperature); a row that is all -inf gives zeros, not NaN."""
    return mx.exp((rows - mx.maximum(highest, LOWEST)) / temperature)


def _kept_by_weight(weights: mx.array, cuts: Cuts) -> mx.array:
    """(S, width) bool of a group without top-k, from its weights."""
    floor: mx.array | float = 0.0 if cuts.min_p is None else cuts.min_p
    if cuts.top_p is not None:
        least = _top_p_floor(weights, cuts.top_p)
        floor = least if cuts.min_p is None else mx.maximum(least, floor)
    return weights >= floor


def _kept_by_rank(
    rows: mx.array, weights: mx.array, leading: mx.array, cuts: Cuts, kth: mx.array
) -> mx.array:
    """(S, width) bool of a group with top-k and, of what that leaves, top-p.

    The `leading` values (S, max_k), the largest last, are all that is ever sorted. They are
    compared as logits: two of them may have one weight. The weights are those of all groups.
    """
    kept = rows >= mx.take_along_axis(leading, kth, axis=-1)
    if cuts.top_p is None and cuts.min_p is None:
        return kept
    weights = weights[cuts.rows]
    if cuts.top_p is not None:
        total = total_weight(mx.where(kept, weights, 0.0))  # with ties with the k-th value
        mass = _mass_above(_weights(leading, leading[:, -1:], cuts.temperature))
        lowest = mx.maximum(_lowest_enough(mass, cuts.top_p * total), kth)
        kept = rows >= mx.take_along_axis(leading, lowest, axis=-1)
    return kept if cuts.min_p is None else kept & (weights >= cuts.min_p)


def _top_p_floor(weights: mx.array, top_p: mx.array) -> mx.array:
    """(S, 1) the smallest weight in the smallest set whose mass is at least top_p of the whole.

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
    """(S, 1) column of the lowest value whose mass, of _mass_above, is at least `goal`.

    Column 0 where even the second is enough, or where none is: it needs no mass of its own.
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
