"""Rows in blocks, uniform numbers, and one draw a row."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import draw as reference_draw

from mlxinfer.sampling.draw import (
    draw,
    largest_entries,
    largest_values,
    pad_rows,
    padded_width,
    stream_of,
    total_weight,
    uniforms,
)

ALMOST_ONE = 1 - 2**-24


def drawn(weights: np.ndarray, numbers: list[float]) -> list[int]:
    rows = np.broadcast_to(weights.astype(np.float32), (len(numbers), len(weights)))
    uniforms = mx.array(np.array(numbers, np.float32))
    return draw(mx.array(rows), uniforms).tolist()


@given(seed=st.integers(0, 2**32), sparse=st.booleans(), uniform=st.integers(0, 2**24 - 1))
def test_draws_as_the_reference(seed: int, sparse: bool, uniform: int):
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=384) ** 3
    if sparse:
        weights[rng.random(384) < 0.97] = 0
        weights[rng.integers(384)] = 1
    (token,) = drawn(weights, [uniform / 2**24])
    assert token in reference_draw(weights / weights.sum(), uniform / 2**24)


@given(seed=st.integers(0, 2**32), zeros=st.floats(0, 0.99), scale=st.floats(-30, 0))
def test_never_a_token_of_weight_zero_at_either_end(seed: int, zeros: float, scale: float):
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(1024) < zeros, 0, rng.random(1024) * 10**scale)
    weights[rng.integers(1024)] = 1
    first, last = np.flatnonzero(weights)[[0, -1]]
    low, high = drawn(weights, [0.0, ALMOST_ONE])
    assert low == first
    assert weights[high] > 0
    assert high <= last


def test_where_rounding_leaves_no_token_beyond_the_last_one_of_weight_is_drawn():
    weights = np.zeros(256)
    weights[:8] = 1
    weights[9] = 1e-12  # lost in the sum, so that nothing lies beyond 8
    assert drawn(weights, [1.0]) == [9]


def test_a_row_without_weight_gives_a_token_and_no_error():
    assert drawn(np.zeros(128), [0.3]) == [0]


def test_total_does_not_depend_on_other_rows():
    rows = mx.array(np.random.default_rng(0).random((5, 640)).astype(np.float32))
    alone = mx.concatenate([total_weight(rows[i : i + 1]) for i in range(5)])
    assert alone.tolist() == total_weight(rows).tolist()
    np.testing.assert_allclose(alone[:, 0], np.array(rows).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 300, 1024])
def test_padding_has_room_to_spare_and_holds_no_token(vocab_size: int):
    logits = mx.zeros((2, vocab_size), mx.bfloat16)
    rows = pad_rows(logits)
    assert rows.shape == (2, padded_width(vocab_size))
    assert rows.shape[1] % 128 == 0
    assert rows.shape[1] > vocab_size
    assert rows.dtype == mx.float32
    assert rows[:, vocab_size:].max().item() == -np.inf
    assert rows[:, :vocab_size].min().item() == 0


@pytest.mark.parametrize("k", [1, 3, 5, 20, 500])  # few go through blocks, many do not
@pytest.mark.parametrize("levels", [2, 50, 10**6])  # from mostly ties to hardly any
def test_largest_values_and_entries(k: int, levels: int):
    rng = np.random.default_rng(k + levels)
    x = rng.integers(0, levels, (4, 10 * 128)).astype(np.float32)
    x[0, rng.random(1280) < 0.5] = -np.inf
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    expected = np.take_along_axis(x, order, axis=-1)
    np.testing.assert_array_equal(largest_values(mx.array(x), k), expected[:, ::-1])
    values, columns = largest_entries(mx.array(x), k)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(columns, order)
    assert columns.dtype == mx.int32


def test_equal_values_come_in_the_order_of_their_columns_whatever_leads_their_blocks():
    x = np.zeros((1, 1280), np.float32)
    x[0, [140, 150, 700, 710]] = [8, 7, 9, 7]
    _, columns = largest_entries(mx.array(x), 4)
    assert columns.tolist() == [[700, 140, 150, 710]]


def numbers_of(streams: list[int], counts: list[int]) -> np.ndarray:
    return uniforms(np.array(streams, dtype=np.uint64), np.array(counts, dtype=np.int64))


def test_it_is_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of state 0
    expected = np.array([word >> 40 for word in published]) / 2**24
    assert numbers_of([0, 0, 0], [0, 1, 2]).tolist() == expected.tolist()


def test_a_number_depends_on_seed_and_count_only():
    streams = [stream_of(seed) for seed in (5, -5, 2**63 - 1, 5)]
    together = numbers_of(streams, [7, 7, 0, 8])
    alone = [
        numbers_of([stream], [count])[0]
        for stream, count in zip(streams, [7, 7, 0, 8], strict=True)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_without_a_seed_streams_differ():
    assert stream_of(None) != stream_of(None)
    assert stream_of(0) == stream_of(0)


def test_numbers_stay_below_one_and_are_even_along_and_across_streams():
    along = numbers_of([stream_of(0)] * 50_000, list(range(50_000)))
    across = numbers_of([stream_of(seed) for seed in range(20_000)], [0] * 20_000)
    for numbers in (along, across):
        assert numbers.dtype == np.float32
        assert numbers.min() >= 0
        assert numbers.max() < 1
        times, _ = np.histogram(numbers, bins=64, range=(0, 1))
        expected = len(numbers) / 64
        chi_square = ((times - expected) ** 2 / expected).sum()
        assert chi_square < 63 + 5 * np.sqrt(2 * 63)
