"""A size is met, and at the least cost that any choice of hull formats has."""

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.convert.calibration.allocation import FormatChoice, allocate, lower_hull
from mlxinfer.convert.recipes import affine

FORMS = [affine(bits) for bits in (2, 3, 4)]
choices = st.lists(st.tuples(st.integers(1, 60), st.floats(0, 10)), min_size=1, max_size=3).map(
    lambda pairs: tuple(FormatChoice(FORMS[i], size, cost) for i, (size, cost) in enumerate(pairs))
)


@given(st.lists(choices, min_size=1, max_size=4), st.integers(0, 100))
def test_fits_and_is_near_the_best(found: list[tuple[FormatChoice, ...]], spare: int) -> None:
    least = sum(min(c.num_bytes for c in unit) for unit in found)
    limit = least + spare
    chosen = allocate(found, limit)
    assert sum(c.num_bytes for c in chosen) <= limit
    cost = sum(c.cost for c in chosen)
    options = [p for p in product(*found)
               if sum(c.num_bytes for c in p) <= limit]  # fmt: skip
    best = min(sum(c.cost for c in p) for p in options)
    largest = max(h[0].cost - h[-1].cost for h in (lower_hull(unit) for unit in found))
    assert best - 1e-9 <= cost <= best + largest + 1e-9  # a greedy knapsack misses one item at most


@given(choices)
def test_hull_is_convex(options: tuple[FormatChoice, ...]) -> None:
    hull = lower_hull(options)
    gains = [(a.cost - b.cost) / max(1, b.num_bytes - a.num_bytes) for a, b in pairwise(hull)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)
