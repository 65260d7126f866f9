"""A layer: what is written to pages and tails is what is read, in every pair of formats."""

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import PAGE, Bits, layer_of

from mlxinfer.cache.keys_values import KeyValueLayer
from mlxinfer.cache.paged import TailPlace
from mlxinfer.core import KVSpec
from mlxinfer.metal_kernels.stored import Plane

HEADS, COUNT = 2, 20
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


def made(bits: Bits, key_dim: int, value_dim: int) -> tuple[KeyValueLayer, mx.array, mx.array]:
    """An empty layer, and keys and values (T, H, D)."""
    spec = KVSpec(HEADS, key_dim, value_dim)
    layer = layer_of(spec, bits, num_pages=6, num_slots=3, dtype=mx.bfloat16)
    rng = np.random.default_rng(key_dim + value_dim)
    keys, values = (
        mx.array(rng.standard_normal((COUNT, HEADS, dim), dtype=np.float32)).astype(mx.bfloat16)
        for dim in (key_dim, value_dim)
    )
    return layer, keys, values


def planes(layer: KeyValueLayer, keys: mx.array, values: mx.array) -> list[tuple[Plane, mx.array]]:
    """Each plane, and what its vectors are once they were stored, (H, T, D)."""
    keys = layer.rotate(keys)  # in the basis of stored keys
    return [
        (plane, plane.decode(plane.fmt.encode(vectors)).swapaxes(0, 1))
        for plane, vectors in ((layer.keys, keys), (layer.values, values))
    ]


def in_tails(layer: KeyValueLayer) -> list[mx.array]:
    """(H, T, D) of the tokens at SLOTS and OFFSETS, keys and values."""
    slots, offsets = mx.array(SLOTS), mx.array(OFFSETS)
    found = layer.read_tails(mx.arange(layer.num_slots))
    assert all(
        mx.array_equal(gathered, viewed)
        for gathered, viewed in zip(found, layer.read_tails(slice(0, layer.num_slots)), strict=True)
    )
    return [tails[slots, :, offsets].swapaxes(0, 1) for tails in found]


@pytest.mark.parametrize(("bits", "key_dim", "value_dim"), FORMATS)
def test_what_is_written_is_read(bits: Bits, key_dim: int, value_dim: int) -> None:
    layer, keys, values = made(bits, key_dim, value_dim)
    stored = layer.encode(keys, values)
    layer.write(stored, TailPlace(None, SLOTS, OFFSETS, 2 * PAGE))
    layer.write_pages(RUNS, 0, stored)
    for (plane, expected), tail in zip(planes(layer, keys, values), in_tails(layer), strict=True):
        assert mx.array_equal(plane.read_runs(RUNS), expected)
        assert mx.array_equal(tail, expected)


@pytest.mark.parametrize(("bits", "key_dim", "value_dim"), FORMATS)
def test_one_token_is_written_as_many_are(bits: Bits, key_dim: int, value_dim: int) -> None:
    layer, keys, values = made(bits, key_dim, value_dim)
    for token in range(COUNT):
        one = slice(token, token + 1)
        place = TailPlace(None, SLOTS[one], OFFSETS[one], 2 * PAGE)
        layer.write(layer.encode(keys[one], values[one]), place)
    for (_, expected), tail in zip(planes(layer, keys, values), in_tails(layer), strict=True):
        assert mx.array_equal(tail, expected)


@pytest.mark.parametrize(("bits", "key_dim", "value_dim"), FORMATS)
def test_tails_are_sealed_and_pasted_and_grow(bits: Bits, key_dim: int, value_dim: int) -> None:
    layer, keys, values = made(bits, key_dim, value_dim)
    layer.write(layer.encode(keys, values), TailPlace(None, SLOTS, OFFSETS, 2 * PAGE))
    layer.resize_tails(7)
    layer.grow_pages(9)
    layer.seal(mx.array(SLOTS), mx.array(OFFSETS), mx.arange(COUNT))
    for plane in (layer.keys, layer.values):
        plane.copy_in(plane.copy_out(4, 12), 100, slot=6, offset=8, page_size=PAGE)
    layer.resize_tails(8)
    pairs = zip(
        planes(layer, keys, values), in_tails(layer), layer.read_tails(slice(6, 7)), strict=True
    )
    for (plane, expected), tail, pasted in pairs:
        assert mx.array_equal(plane.read_runs([(0, COUNT)]), expected)
        assert mx.array_equal(plane.read_runs([(100, 108)]), expected[:, 4:12])
        assert mx.array_equal(tail, expected)
        assert mx.array_equal(pasted[0, :, 8:16], expected[:, 4:12])
        assert not pasted[0, :, 16:].any()
