"""Pages as bytes: what comes back is what was there, in every format."""

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import Bits

from mlxinfer.cache import kv
from mlxinfer.cache.kv import KVCache
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache_specs import KVSpec
from mlxinfer.config import KVOptions

PAGE = 4
SPECS = [KVSpec(2, 24, 16), KVSpec(1, 24, 24, window=6), KVSpec(2, 24, 16)]


def noisy_cache(dtype: mx.Dtype, bits: Bits, seed: int = 0) -> KVCache:
    """Pools of random bytes: also what no step would write (NaN) must come back."""
    cache = KVCache(
        lay_out(SPECS, KVOptions(bits=bits), dtype=dtype, key_bias=False),
        page_size=PAGE,
        max_batch=2,
        prefill_chunk=8,
        budget_bytes=1 << 20,
        num_pages=9,
    )
    random = np.random.default_rng(seed)
    for plane in (plane for group in cache.groups for plane in group.planes):
        plane.pages = [
            mx.array(random.integers(0, 256, array.nbytes, np.uint8))
            .view(array.dtype)
            .reshape(array.shape)
            for array in plane.pages
        ]
    return cache


def page_parts(cache: KVCache, group: int, page: int) -> list[bytes]:
    """What a page holds, part by part, read without any of the code that is tested."""
    return [
        np.array(array.view(mx.uint8))[:, page * PAGE : (page + 1) * PAGE].tobytes()
        for plane in cache.groups[group].planes
        for array in plane.pages
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (mx.float32, (None, None)), (mx.bfloat16, (None, None)), (mx.float16, (8, 8)),
        (mx.float32, (8, 4)), (mx.bfloat16, (4, None)),
    ],
)  # fmt: skip
def test_pages_move_between_caches_bit_for_bit(
    dtype: mx.Dtype, bits: Bits, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "CHUNK_BYTES", chunk_bytes)
    source, target = noisy_cache(dtype, bits), noisy_cache(dtype, bits, seed=1)
    for group in range(len(source.groups)):
        taken, placed, other = [5, 0, 7, 6], [2, 3, 8, 0], 4
        before = page_parts(target, group, other)
        payloads = source.groups[group].read_out(taken)
        assert {len(p) for p in payloads} == {source.groups[group].page_bytes}
        target.groups[group].load(placed, payloads)
        for page, payload, place in zip(taken, payloads, placed, strict=True):
            assert b"".join(page_parts(source, group, page)) == payload
            assert page_parts(target, group, place) == page_parts(source, group, page)
        assert page_parts(target, group, other) == before


def test_nothing_is_read_or_written_where_nothing_is_asked_for() -> None:
    cache = noisy_cache(mx.float32, (None, None))
    assert cache.groups[0].read_out([]) == []
    cache.groups[0].load([], [])
