"""Ranges that are decoded together hold every run that is read, and little else."""

from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.plain_attention import cover

RUNS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20)).map(
            lambda run: (16 * run[0], 16 * (run[0] + run[1]))
        ),
        max_size=3,
    ),
    max_size=8,
)


@given(runs=RUNS, gap=st.sampled_from([0, 16, 64]), most=st.sampled_from([16, 128, 4096]))
def test_every_run_lies_in_the_last_cover_that_begins_before_it(
    runs: list[list[tuple[int, int]]], gap: int, most: int
) -> None:
    covers = cover(runs, gap=gap, most=most)
    for start, stop in (run for some in runs for run in some):
        begin, end = [c for c in covers if c[0] <= start][-1]
        assert begin <= start
        assert stop <= end


@given(runs=RUNS, gap=st.sampled_from([0, 16, 64]), most=st.sampled_from([16, 128, 4096]))
def test_needless_decoding_is_bounded(
    runs: list[list[tuple[int, int]]], gap: int, most: int
) -> None:
    longest = max((stop - start for some in runs for start, stop in some), default=0)
    wanted = {slot for some in runs for run in some for slot in range(*run)}
    for begin, end in cover(runs, gap=gap, most=most):
        assert end - begin <= max(most, longest)
        idle = [slot for slot in range(begin, end) if slot not in wanted]
        held = end - begin - len(idle)
        assert len(idle) <= gap * held // 16  # a gap lies between two pages that are wanted


def test_neighbours_are_decoded_together() -> None:
    assert cover([[(0, 64)], [(64, 96)], [(112, 128)]], gap=16, most=4096) == [(0, 128)]
    assert cover([[(0, 64)], [(96, 128)]], gap=16, most=4096) == [(0, 64), (96, 128)]
    assert cover([[(0, 64)], [(64, 128)]], gap=16, most=96) == [(0, 64), (64, 128)]
