import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.sampling.draw import largest_entries, largest_values, pad_rows, padded_width


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
