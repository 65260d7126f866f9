"""A layer's pool: what is written to pages and tails is what is read, in every pair of formats."""

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache.formats import Bits
from mlxinfer.cache.pool import LayerPool, Plane, TailPlace
from mlxinfer.core import KVSpec

HEADS, PAGE, COUNT = 2, 16, 20
RUNS = [(32, 40), (70, 82)]  # of 20 tokens
SLOTS = np.arange(COUNT, dtype=np.int32) % 3
OFFSETS = np.arange(COUNT, dtype=np.int32) // 3 * 3 % (2 * PAGE)

FORMATS: list[tuple[Bits, int, int]] = [
    ((None, None), 64, 64),
    ((8, 8), 64, 64),
    ((4, 4), 64, 64),
    ((8, 4), 64, 64),
    ((None, 8), 64, 64),
    ((None, None), 64, 128),
    ((8, 4), 32, 64),  # codes of both are 32 bytes, and mean something else
]


def made(bits: Bits, key_dim: int, value_dim: int) -> tuple[LayerPool, mx.array, mx.array]:
    """An empty pool, and keys and values (T, H, D)."""
    spec = KVSpec(HEADS, key_dim, value_dim)
    pool = LayerPool(spec, page_size=PAGE, num_pages=6, num_slots=3, dtype=mx.bfloat16, bits=bits)
    rng = np.random.default_rng(key_dim + value_dim)
    keys, values = (
        mx.array(rng.standard_normal((COUNT, HEADS, dim), dtype=np.float32)).astype(mx.bfloat16)
        for dim in (key_dim, value_dim)
    )
    return pool, keys, values


def planes(pool: LayerPool, keys: mx.array, values: mx.array) -> list[tuple[Plane, mx.array]]:
    """Each plane, and what its vectors are once they were stored, (H, T, D)."""
    keys, _ = pool.encode(keys, keys, values)  # in the basis of stored keys
    return [
        (plane, plane.fmt.decode(plane.fmt.encode(vectors)).swapaxes(0, 1))
        for plane, vectors in ((pool.keys, keys), (pool.values, values))
    ]


def in_tails(pool: LayerPool) -> list[mx.array]:
    """(H, T, D) of the tokens at SLOTS and OFFSETS, keys and values."""
    slots, offsets = mx.array(SLOTS), mx.array(OFFSETS)
    found = pool.read_tails(mx.arange(pool.num_slots))
    assert all(
        mx.array_equal(gathered, viewed)
        for gathered, viewed in zip(found, pool.read_tails(slice(0, pool.num_slots)), strict=True)
    )
    return [tails[slots, :, offsets].swapaxes(0, 1) for tails in found]


@pytest.mark.parametrize(("bits", "key_dim", "value_dim"), FORMATS)
def test_what_is_written_is_read(bits: Bits, key_dim: int, value_dim: int) -> None:
    pool, keys, values = made(bits, key_dim, value_dim)
    _, stored = pool.encode(keys, keys, values)
    pool.write_tails(TailPlace(SLOTS, OFFSETS, 2 * PAGE), stored)
    pool.write_pages(RUNS, 0, stored)
    for (plane, expected), tail in zip(planes(pool, keys, values), in_tails(pool), strict=True):
        assert mx.array_equal(plane.read_runs(RUNS), expected)
        assert mx.array_equal(tail, expected)


@pytest.mark.parametrize(("bits", "key_dim", "value_dim"), FORMATS)
def test_one_token_is_written_as_many_are(bits: Bits, key_dim: int, value_dim: int) -> None:
    pool, keys, values = made(bits, key_dim, value_dim)
    for token in range(COUNT):
        one = slice(token, token + 1)
        place = TailPlace(SLOTS[one], OFFSETS[one], 2 * PAGE)
        pool.write_tails(place, pool.encode(keys[one], keys[one], values[one])[1])
    for (_, expected), tail in zip(planes(pool, keys, values), in_tails(pool), strict=True):
        assert mx.array_equal(tail, expected)


@pytest.mark.parametrize(("bits", "key_dim", "value_dim"), FORMATS)
def test_tails_are_sealed_and_pasted_and_grow(bits: Bits, key_dim: int, value_dim: int) -> None:
    pool, keys, values = made(bits, key_dim, value_dim)
    pool.write_tails(TailPlace(SLOTS, OFFSETS, 2 * PAGE), pool.encode(keys, keys, values)[1])
    pool.grow_tails(7)
    pool.grow_pages(9)
    pool.seal(mx.array(SLOTS), mx.array(OFFSETS), mx.arange(COUNT))
    for plane in (pool.keys, pool.values):
        plane.copy_in(plane.copy_out(4, 12), 100, slot=6, offset=8)
    pool.grow_tails(8)
    pairs = zip(
        planes(pool, keys, values), in_tails(pool), pool.read_tails(slice(6, 7)), strict=True
    )
    for (plane, expected), tail, pasted in pairs:
        assert mx.array_equal(plane.read_runs([(0, COUNT)]), expected)
        assert mx.array_equal(plane.read_runs([(100, 108)]), expected[:, 4:12])
        assert mx.array_equal(tail, expected)
        assert mx.array_equal(pasted[0, :, 8:16], expected[:, 4:12])
        assert not pasted[0, :, 16:].any()
