"""Which tokens an indexer lets a query see: the best, and of equal ones the earliest."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.latent import ranked
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache_specs import LatentSpec
from mlxinfer.config import KVOptions
from mlxinfer.errors import InvalidRequestError

HEADS, DIM = 2, 3


@given(
    start=st.integers(0, 20),
    rows=st.integers(1, 6),
    behind=st.integers(0, 3),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**30),
)
def test_the_best_are_seen(start: int, rows: int, behind: int, count: int, seed: int) -> None:
    """Small whole numbers: most ranks are equal to others, and exact."""
    rng = np.random.default_rng(seed)
    queries, weights, keys = (
        rng.integers(-1, 2, shape).astype(np.float32)
        for shape in ((rows, HEADS, DIM), (rows, HEADS), (start + rows + behind, DIM))
    )
    visible = mx.arange(len(keys)) <= start + mx.arange(rows)[:, None]
    seen = np.array(ranked(*(mx.array(a) for a in (queries, weights, keys)), visible, count))
    for row in range(rows):
        visible = keys[: start + row + 1]
        scores = np.maximum(queries[row] @ visible.T, 0)  # (HEADS, S)
        best = np.argsort(-(weights[row] @ scores), kind="stable")[:count]
        assert np.flatnonzero(seen[row]).tolist() == sorted(best.tolist())


def test_a_window_is_refused_and_index_keys_stay_as_they_are() -> None:
    spec = LatentSpec(32, 8, index_dim=24, num_ranked=12)
    assert spec.numbers == 64
    [layer] = lay_out([spec], KVOptions(bits=(8, 8)), dtype=mx.bfloat16, key_bias=False)
    assert layer.token_bytes == 40 + 2 * 2 + 24 * 2
    with pytest.raises(InvalidRequestError, match="chooses the tokens"):
        lay_out([spec], KVOptions(window=64), dtype=mx.bfloat16, key_bias=False)
