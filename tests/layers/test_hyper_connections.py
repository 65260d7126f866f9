"""Connections of several residual streams beside their formulas in NumPy."""

import mlx.core as mx
import numpy as np

from mlxinfer.layers.hyper_connections import (
    MeanOfStreams,
    MixingConnection,
    StreamLogits,
    WeightedStreams,
)
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.metal_kernels.mixing import Mixing, mixing_twin

N, HIDDEN, EPS = 3, 8, 1e-6


def _random(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def _logits(rng, rows):
    parts = _random(rng, rows, N * HIDDEN), _random(rng, rows), _random(rng, rows)
    return StreamLogits(*map(mx.array, parts), 1e-5), parts


def _by_hand(x, parts):
    weight, scale, base = parts
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return normed @ weight.T * scale + base


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _norm():
    return RMSNorm(mx.ones(HIDDEN), 1e-5)


def _normed(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def test_a_mixing_connection_is_its_formula():
    rng = np.random.default_rng(1)
    logits, parts = _logits(rng, N * (N + 2))
    connection = MixingConnection(logits, _norm(), Mixing(N, 20, EPS))
    x = _random(rng, 5, N * HIDDEN)
    actual = np.array(connection(mx.array(x), lambda read: 2 * read + 1))

    numbers, streams = _by_hand(x, parts), x.reshape(5, N, HIDDEN)
    weights = _sigmoid(numbers[:, :N]) + EPS
    y = 2 * _normed((weights[..., None] * streams).sum(1)) + 1
    matrix = np.exp(numbers[:, 2 * N :].reshape(5, N, N))
    matrix = matrix / matrix.sum(-1, keepdims=True) + EPS
    for _ in range(20):
        matrix /= matrix.sum(1, keepdims=True) + EPS
        last, matrix = matrix, matrix / (matrix.sum(2, keepdims=True) + EPS)
    expected = 2 * _sigmoid(numbers[:, N : 2 * N])[..., None] * y[:, None]
    expected = expected + np.einsum("tij,tid->tjd", last, streams)
    np.testing.assert_allclose(actual, expected.reshape(5, -1), atol=2e-5)


def test_rows_and_columns_of_a_mixing_matrix_sum_to_one():
    logits = mx.array(_random(np.random.default_rng(2), 50, N * (N + 2)))
    _, _, matrix = mixing_twin(logits, Mixing(N, 20, EPS))
    for axis in (1, 2):
        np.testing.assert_allclose(np.array(matrix.sum(axis=axis)), 1.0, atol=1e-3)


def test_streams_end_as_their_weighted_sum_or_their_mean():
    rng = np.random.default_rng(3)
    logits, parts = _logits(rng, N)
    x = _random(rng, 5, N * HIDDEN)
    streams, weights = x.reshape(5, N, HIDDEN), _sigmoid(_by_hand(x, parts)) + EPS
    actual = WeightedStreams(logits, _norm(), EPS)(mx.array(x))
    expected = _normed((weights[..., None] * streams).sum(1))
    np.testing.assert_allclose(np.array(actual), expected, atol=1e-5)
    mean = MeanOfStreams(_norm(), N)(mx.array(x))
    np.testing.assert_allclose(np.array(mean), _normed(streams.mean(1)), atol=1e-5)
