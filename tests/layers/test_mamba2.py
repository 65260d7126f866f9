"""Mamba-2: chunks of matrix products give what the definition gives token by token."""

from itertools import pairwise
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache_specs import StateSpec
from mlxinfer.layers.linear import Linear
from mlxinfer.layers.mamba2 import Mamba2
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.layers.recurrent import CausalConv
from mlxinfer.layers.step import Arrays

HIDDEN, HEADS, GROUPS, HEAD, STATE, LENGTH = 20, 6, 2, 5, 7, 4
INNER = HEADS * HEAD
CHANNELS = INNER + 2 * GROUPS * STATE
SPEC = StateSpec((((LENGTH - 1, CHANNELS), "float32"), ((HEADS, HEAD, STATE), "float32")))


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32))


def mixer_of(dtype: mx.Dtype = mx.float32) -> Mamba2:
    rng = np.random.default_rng(0)
    return Mamba2(
        in_proj=Linear(normal(rng, INNER + CHANNELS + HEADS, HIDDEN)),
        out_proj=Linear(normal(rng, HIDDEN, INNER)),
        conv=CausalConv(
            normal(rng, CHANNELS, LENGTH, 1).astype(dtype), normal(rng, CHANNELS).astype(dtype)
        ),
        norm=RMSNorm(normal(rng, GROUPS, INNER // GROUPS), 1e-6),
        num_groups=GROUPS,
        log_rate=normal(rng, HEADS) - 2,
        step_bias=normal(rng, HEADS),
        skip=normal(rng, HEADS),
        step_limits=(0.0, float("inf")),
        spec=SPEC,
    )


def random_inputs(rng: np.random.Generator, batch: int, length: int) -> Arrays:
    return [normal(rng, batch, length, INNER + CHANNELS + HEADS)]


def forward(
    mixer: Mamba2, inputs: Arrays, states: Arrays, lengths: mx.array | None
) -> tuple[mx.array, Arrays]:
    """Outputs, and the states after `lengths` tokens, from states before them."""
    return mixer.in_mlx(inputs, states, lengths)


def random_states(rng: np.random.Generator, batch: int) -> Arrays:
    return [normal(rng, batch, *shape) for shape, _ in SPEC.shapes]


@pytest.mark.parametrize("seed", range(4))
def test_any_split_of_a_sequence_gives_the_same(seed: int) -> None:
    rng, draw, mixer = np.random.default_rng(seed), Random(seed), mixer_of()
    inputs, states = random_inputs(rng, 2, 90), random_states(rng, 2)
    y, new = forward(mixer, inputs, states, None)
    parts = []
    for start, stop in pairwise(sorted({0, 90, *draw.sample(range(1, 90), 6)})):
        part, states = forward(mixer, [one[:, start:stop] for one in inputs], states, None)
        parts.append(part)
    np.testing.assert_allclose(
        np.array(mx.concatenate(parts, axis=1)), np.array(y), rtol=1e-5, atol=2e-4
    )
    for one, other in zip(states, new, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_behind_the_end_of_a_sequence_change_nothing(seed: int) -> None:
    rng, draw, mixer = np.random.default_rng(seed), Random(seed), mixer_of()
    inputs, states = random_inputs(rng, 5, 8), random_states(rng, 5)
    kept = [0, *(draw.randint(1, 8) for _ in range(4))]
    y, new = forward(mixer, inputs, states, mx.array(kept))
    for row, length in enumerate(kept):
        before = [one[row : row + 1] for one in states]
        after = [one[row : row + 1] for one in new]
        if not length:
            assert all(mx.array_equal(one, two) for one, two in zip(before, after, strict=True))
            continue
        prefix = [one[row : row + 1, :length] for one in inputs]
        part, alone = forward(mixer, prefix, before, None)
        np.testing.assert_allclose(np.array(y[row, :length]), np.array(part[0]), atol=2e-5)
        for one, other in zip(after, alone, strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), atol=2e-5)
        noise = [mx.concatenate([one, one * 7 + 1], axis=1) for one in prefix]
        again = forward(mixer, noise, before, mx.array([length]))[1]
        assert all(mx.allclose(a, b, atol=2e-5) for a, b in zip(again, after, strict=True))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_states_of_narrow_activations_are_float32(dtype: mx.Dtype) -> None:
    rng, mixer = np.random.default_rng(3), mixer_of(dtype)
    (projected,), states = random_inputs(rng, 2, 5), random_states(rng, 2)
    for lengths in (None, mx.array([2, 5])):
        _, new = forward(mixer, [projected.astype(dtype)], states, lengths)
        assert [one.dtype for one in new] == [mx.float32, mx.float32]
