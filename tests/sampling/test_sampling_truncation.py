from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_cases import PARAMS, VOCAB, changed, logits, rows
from sampling_reference import Row, adjusted_logits, kept_tokens

from mlxinfer.core import SamplingParams
from mlxinfer.sampling import parts
from mlxinfer.sampling.parts import weights_of

DRAWN = PARAMS.filter(lambda params: not params.greedy)


def weights(x: np.ndarray, *params: SamplingParams) -> np.ndarray:
    """(V,) or (R, V) what is kept of the same logits under each of these settings."""
    kept = changed([Row(p.changed({"xtc_probability": 0.0}), x) for p in params])
    temperature = mx.array([[p.temperature] for p in params])
    actual = np.array(weights_of(mx.array(kept), temperature))
    return actual if len(params) > 1 else actual[0]


@given(x=logits(), params=DRAWN)
def test_kept_tokens_equal_the_reference(x: np.ndarray, params: SamplingParams):
    settings = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    cut = SamplingParams(temperature=params.temperature, **settings)
    expected = kept_tokens(Row(cut, x))
    assume(not expected.in_doubt)
    got = weights(x, cut)
    seen = expected.probabilities > 1e-30  # below it float32 has nothing
    np.testing.assert_array_equal(got > 1e-30 * got.sum(), seen)
    np.testing.assert_allclose(got / got.sum(), expected.probabilities, rtol=1e-4, atol=1e-30)


def test_ties_at_a_cut_are_kept_together():
    x = np.array([3, 1, 2, 1, 1, 0], np.float32)
    kept = weights(x, SamplingParams(temperature=1.0, top_k=3)) > 0
    assert kept.tolist() == [True, True, True, True, True, False]
    flat = weights(np.zeros(VOCAB, np.float32), SamplingParams(temperature=1.0, top_p=0.1))
    assert (flat == 1).all()


def test_top_p_counts_only_what_top_k_left():
    x = np.log(np.array([0.3, 0.2, 0.2, 0.15, 0.15], np.float32))
    both = weights(x, SamplingParams(temperature=1.0, top_k=1, top_p=0.5))
    assert (both > 0).tolist() == [True, False, False, False, False]
    # Three are left with shares of 3/7, 2/7 and 2/7: the first two hold 5/7, their tie comes along.
    both = weights(x, SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    assert (both > 0).tolist() == [True, True, True, False, False]


def test_a_set_that_has_exactly_top_p_is_enough():
    x = np.log(np.array([0.5, 0.25, 0.25], np.float32))
    for cut in ({}, {"top_k": 2}):  # with top_k, the tie makes it all three
        assert (weights(x, SamplingParams(temperature=1.0, top_p=0.5, **cut)) > 0).sum() == 1


def test_tokens_below_rounding_stay_where_top_p_is_off():
    x = np.array([0.0, *[-20.0] * 99], np.float32)
    rest = [SamplingParams(temperature=1.0, top_k=80, top_p=p) for p in (1.0, 1 - 1e-12, 0.5)]
    assert (weights(x, *rest) > 0).sum(axis=1).tolist() == [100, 100, 1]


def test_a_top_p_near_zero_keeps_the_most_probable():
    x = np.array([1, 2, 2, 0], np.float32)
    for cut in ({}, {"top_k": 3}):
        kept = weights(x, SamplingParams(temperature=1.0, top_p=1e-40, **cut)) > 0
        assert kept.tolist() == [False, True, True, False]


@given(x=logits(), params=st.lists(DRAWN, min_size=1, max_size=3))
def test_halving_finds_the_floor_that_sorting_finds(x: np.ndarray, params: list[SamplingParams]):
    collected = []
    for width in (8, parts.SORTED, 10**9):
        with mock.patch.object(parts, "SORTED", width):
            collected.append(weights(x, *params))
    assume(not any(kept_tokens(Row(p, x)).in_doubt for p in params))
    np.testing.assert_array_equal(collected[0], collected[2])
    np.testing.assert_array_equal(collected[1], collected[2])


def test_a_token_at_exactly_n_sigma_stays():
    params = SamplingParams(temperature=1.0, top_n_sigma=2.0)
    x = np.full((200, 127), -np.inf, np.float32)  # two tokens that a grammar allows
    x[:, 3:5] = np.random.default_rng(0).normal(0, 8, (200, 2))
    np.testing.assert_array_equal(changed([Row(params, row) for row in x]), x)


def test_a_row_of_no_token_gives_zeros():
    x = np.full(5, -np.inf, np.float32)
    for cut in ({}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}):
        assert (weights(x, SamplingParams(temperature=1.0, **cut)) == 0).all()


def test_a_long_row_is_cut_in_the_same_place_but_for_rounding():
    x = (np.random.default_rng(0).normal(size=40_000) * 2).astype(np.float32)
    for cut in ({"top_k": 50}, {"top_k": 50, "top_p": 0.8}, {"top_p": 0.8}, {"min_p": 0.05}):
        params = SamplingParams(temperature=0.9, **cut)
        expected = kept_tokens(Row(params, x)).probabilities > 0
        differing = (weights(x, params) > 0) != expected
        assert differing.sum() <= 1e-3 * expected.sum()


FIELDS = (
    "repetition_penalty", "repetition_window", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_tokens",
)  # fmt: skip


def only_penalties(row: Row) -> Row:
    params = SamplingParams(**{name: getattr(row.params, name) for name in FIELDS})
    return Row(params, row.logits, row.prompt_ids, row.output_ids, row.stop_ids)


@given(cases=st.lists(rows(), min_size=1, max_size=5))
def test_exactly_the_reference(cases: list[Row]):
    cases = [only_penalties(row) for row in cases]
    expected = np.stack([adjusted_logits(row) for row in cases])
    np.testing.assert_array_equal(changed(cases), expected)


@pytest.mark.parametrize("strength", [1e-38, 1e38])
def test_absurd_strengths_give_no_nan(strength: float):
    logits = np.array([-1.0, 0.0, 1.0] * 100, np.float32)
    row = Row(SamplingParams(repetition_penalty=strength), logits, range(VOCAB))
    assert not np.isnan(changed([row])).any()
