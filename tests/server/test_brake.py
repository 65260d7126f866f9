"""Pauses after loads that failed, on a clock of the test's."""

from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.server.models import FIRST_PAUSE_S, MAX_PAUSE_S, Brake


def test_a_model_that_did_not_fail_has_no_pause() -> None:
    assert Brake().left_s(-5.0) == 0.0


def test_pauses_double_up_to_the_longest() -> None:
    brake = Brake()
    pauses = [brake.fail(100.0) for _ in range(100)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S


@given(st.lists(st.tuples(st.sampled_from(["fail", "release"]), st.floats(0, 1000))))
def test_a_pause_ends_after_its_announced_length(events: list[tuple[str, float]]) -> None:
    brake, now_s, in_a_row = Brake(), 0.0, 0
    for what, later_s in events:
        now_s += later_s
        if what == "release":
            brake.release()
            in_a_row = 0
            assert brake.left_s(now_s) == 0.0
            continue
        pause_s = brake.fail(now_s)
        in_a_row += 1
        assert brake.num_failures == in_a_row
        assert brake.left_s(now_s + pause_s) == 0.0
        assert 0 < brake.left_s(now_s + pause_s / 2) <= MAX_PAUSE_S
