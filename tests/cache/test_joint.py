"""Keys and values in one vector attend as they do in vectors of their own, in every format."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import PAGE, Bits, Tokens, layer_of, prepare

from mlxinfer.cache.keys_values import JointLayer, KeyValueLayer
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache.pages import PageTable
from mlxinfer.cache_specs import KVSpec
from mlxinfer.config import KVOptions
from mlxinfer.engine.batch import step_metadata
from mlxinfer.metal_kernels.paged_attention import Softmax

HEADS, GROUP, DIM = 2, 3, 64
SPEC = KVSpec(HEADS, DIM, DIM, rope_dims=16)
LENGTHS, QUERIES = (37, 50, 5), (1, 20, 3)
PAGES = ([6, 1, 4], [0, 3, 8, 9, 10], [5])


def vectors(count: int, heads: int, seed: int) -> mx.array:
    shape = (count, heads, DIM)
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def keys_and_values(count: int, seed: int) -> tuple[mx.array, mx.array]:
    """Keys (T, H, D) that are their values but for the numbers that rotate."""
    values, others = vectors(count, HEADS, seed), vectors(count, HEADS, seed + 1)
    is_rotated = mx.arange(DIM) % (DIM // 2) < SPEC.rope_dims // 2
    return mx.where(is_rotated, others, values), values


def step(layer: KeyValueLayer, short: list[Tokens], long: list[Tokens], seed: int) -> mx.array:
    metadata = step_metadata(short, long)
    prepare(layer, metadata)
    count = len(metadata.positions)
    queries = vectors(count, HEADS * GROUP, seed + 2)
    outputs = layer.attend(queries, *keys_and_values(count, seed), Softmax(0.125))
    mx.eval(outputs, layer.arrays())
    return outputs


def attended(layer: KeyValueLayer) -> list[mx.array]:
    """What prompts see, then a step of one token, a chunk and three tokens."""
    tables = [PageTable(PAGE, pages=list(pages)) for pages in PAGES]
    attended = [
        step(layer, [], [Tokens(0, 0, length, 0, slot, [table])], seed=slot)
        for slot, (table, length) in enumerate(zip(tables, LENGTHS, strict=True))
    ]
    segments = [
        Tokens(row, length, count, length - length % PAGE, slot, [table])
        for slot, (table, row, length, count) in enumerate(
            zip(tables, (0, 4, 1), LENGTHS, QUERIES, strict=True)
        )
    ]
    return [*attended, step(layer, [segments[0], segments[2]], [segments[1]], seed=9)]


def num_bytes(layer: KeyValueLayer) -> int:
    return sum(array.nbytes for array in layer.arrays())


@pytest.mark.parametrize("bits", [(None, None), (8, 8), (4, 4)])
def test_attends_as_keys_and_values_apart(bits: Bits) -> None:
    sizes: dict[str, Any] = {"num_pages": 11, "num_slots": 3}
    joint = layer_of(SPEC, bits, **sizes)
    assert isinstance(joint, JointLayer)
    apart = layer_of(replace(SPEC, rope_dims=0), bits, **sizes)
    worst = {None: 1e-5, 8: 0.01, 4: 0.15}[bits[0]]  # of the mean: codes are of other groups
    for ours, theirs in zip(attended(joint), attended(apart), strict=True):
        off = np.abs(np.array(ours) - np.array(theirs))
        assert off.mean() <= worst
        assert off.max() <= 8 * worst
    assert num_bytes(joint) <= 0.67 * num_bytes(apart)


def test_a_token_takes_80_numbers_of_128() -> None:
    assert SPEC.numbers == HEADS * 80
    for bits, num_bytes in ((None, 80 * 2), (8, 80 + 2 * 2 * 2)):
        options = KVOptions(bits=(bits, bits))
        [layer] = lay_out([SPEC], options, dtype=mx.bfloat16, key_bias=False)
        assert layer.token_bytes == HEADS * num_bytes


@pytest.mark.parametrize(
    ("bits", "rope_dims", "kept"),
    [
        ((None, None), 12, True),
        ((8, 8), 16, True),
        ((8, 8), 12, False),
        ((8, 4), 16, False),
        ((4, 4), 16, True),
        ((4, 4), 24, False),
    ],
)
def test_one_format_holds_both_or_they_are_apart(bits: Bits, rope_dims: int, kept: bool) -> None:
    specs = [replace(SPEC, rope_dims=rope_dims)]
    [layer] = lay_out(specs, KVOptions(bits=bits), dtype=mx.float16, key_bias=False)
    assert layer.spec == replace(SPEC, rope_dims=rope_dims if kept else 0)
