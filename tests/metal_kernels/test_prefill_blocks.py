"""Prompts over keys that are made block by block: blocks joined, against float64."""

import os
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.metal_kernels import block_attention
from mlxinfer.metal_kernels.block_attention import attend_in_tiles, block_edges

SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
HEADS, DIMS = 2, (192, 128)


def expected(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int) -> np.ndarray:
    scores = np.einsum("nhd,hsd->hns", queries, keys) * 0.1
    positions = start + np.arange(len(queries))
    scores[:, np.arange(keys.shape[1]) > positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hns,hsv->nhv", weights, values)


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("start", "count", "most_keys"), [(0, 20, 64), (70, 33, 512), (70, 9, 32), (64, 40, 64)]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_joined_blocks_are_one_softmax(
    start: int, count: int, most_keys: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "LEAST_KEYS", most_keys)
    monkeypatch.setattr(block_attention, "EXPANDED_BYTES", 1)
    rng = np.random.default_rng([SEED, start, count])
    shapes = (count, HEADS, DIMS[0]), *((HEADS, start + count, dim) for dim in DIMS)
    queries, keys, values = (
        mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype) for shape in shapes
    )
    reads = []

    def read(first: int, stop: int, after: mx.array | None) -> tuple[mx.array, mx.array]:
        reads.append((first, stop, after is not None))
        return keys[:, first:stop], values[:, first:stop]

    machine = MetalCPU(seed=1, may_stay_unwritten=("outputs", "figures"))
    actual = machine.clean(lambda: attend_in_tiles(queries, read, start, DIMS[1], scale=0.1))
    assert actual.dtype == dtype
    wide = [np.array(a.astype(mx.float32)).astype(np.float64) for a in (queries, keys, values)]
    off = np.abs(np.array(actual.astype(mx.float32)) - expected(*wide, start)).max()
    assert off <= (2e-5 if dtype == mx.float32 else 2e-2)
    assert [(first, stop) for first, stop, _ in reads] == block_edges(start, count, 1)
    assert all(waits for *_, waits in reads[1:]), "one block is expanded at a time"


def test_blocks_take_64_megabytes_and_every_query_sees_each() -> None:
    token_bytes = 128 * (192 + 128) * 2  # DeepSeek V3
    for start, count in ((0, 5), (100_000, 2_048), (815, 1), (816, 1)):
        edges = block_edges(start, count, token_bytes)
        assert edges[0][0] == 0
        assert edges[-1][1] == start + count
        assert all(stop == first for (_, stop), (first, _) in pairwise(edges))
        assert edges[-1][0] <= start
        assert all(first % 16 == 0 for first, _ in edges)
        assert all((stop - first) * token_bytes <= 64 << 20 for first, stop in edges[:-1])
