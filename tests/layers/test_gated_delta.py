"""Gated DeltaNet: any split of a sequence, alone or beside others, gives the same bits."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache_specs import StateSpec
from mlxinfer.layers.gated_delta import GatedDeltaNet
from mlxinfer.layers.linear import Linear
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.layers.recurrence_check import TOLERANCE, DeltaShape, difference
from mlxinfer.layers.recurrent import CausalConv, RecurrentMixer
from mlxinfer.layers.step import Arrays

HIDDEN, KEY_HEADS, HEADS, KEY, VALUE, LENGTH = 20, 2, 6, 8, 5, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
SPEC = StateSpec((((LENGTH - 1, CHANNELS), "float32"), ((HEADS, VALUE, KEY), "float32")))


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32))


def mixer_of(dtype: mx.Dtype = mx.float32) -> GatedDeltaNet:
    rng = np.random.default_rng(0)
    width = CHANNELS + HEADS * VALUE + 2 * HEADS
    return GatedDeltaNet(
        in_proj=Linear(normal(rng, width, HIDDEN)),
        out_proj=Linear(normal(rng, HIDDEN, HEADS * VALUE)),
        conv=CausalConv(normal(rng, CHANNELS, LENGTH, 1).astype(dtype)),
        norm=RMSNorm(normal(rng, VALUE), 1e-6),
        log_rate=normal(rng, HEADS),
        step_bias=normal(rng, HEADS),
        spec=SPEC,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_mlxs_recurrence_equals_its_steps(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they are the same bits; what is another is seen."""
    shape = DeltaShape(2, 8, 4, 5, 9, masked=masked)
    assert difference(shape) == 0
    right = mx.fast.gated_delta_update

    def wrong(*arguments: mx.array | None) -> Sequence[mx.array]:
        y, state = right(*arguments)
        return (y, state * 1.1) if y.shape[1] > 1 else (y, state)

    monkeypatch.setattr(mx.fast, "gated_delta_update", wrong)
    assert difference(shape) > TOLERANCE


def random_inputs(rng: np.random.Generator, batch: int, length: int) -> Arrays:
    return [normal(rng, batch, length, CHANNELS + HEADS * VALUE + 2 * HEADS)]


def forward(
    mixer: RecurrentMixer, inputs: Arrays, states: Arrays, lengths: mx.array | None
) -> tuple[mx.array, Arrays]:
    """Outputs, and the states after `lengths` tokens, from states before them."""
    return mixer.in_mlx(inputs, states, lengths)


def random_states(rng: np.random.Generator, batch: int) -> Arrays:
    return [normal(rng, batch, *shape) for shape, _ in SPEC.shapes]


def assert_same(left: Sequence[mx.array], right: Sequence[mx.array]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_any_split_of_a_sequence_gives_the_same_bits(seed: int) -> None:
    rng, draw = np.random.default_rng(seed), Random(seed)
    mixer, inputs, states = mixer_of(), random_inputs(rng, 2, 17), random_states(rng, 2)
    y, new = forward(mixer, inputs, states, None)
    cuts = sorted({0, 17, *draw.sample(range(1, 17), draw.randint(1, 16))})
    parts = []
    for start, stop in pairwise(cuts):
        part, states = forward(mixer, [one[:, start:stop] for one in inputs], states, None)
        parts.append(part)
    assert_same([mx.concatenate(parts, axis=1), *states], [y, *new])


@pytest.mark.parametrize("seed", range(4))
def test_a_ragged_batch_gives_each_sequence_the_bits_that_it_gets_alone(seed: int) -> None:
    rng, draw = np.random.default_rng(seed), Random(seed)
    mixer, inputs, states = mixer_of(), random_inputs(rng, 5, 8), random_states(rng, 5)
    lengths = [draw.randint(1, 8) for _ in range(5)]
    y, new = forward(mixer, inputs, states, mx.array(lengths))
    for row, length in enumerate(lengths):
        alone = [one[row : row + 1, :length] for one in inputs]
        part, after = forward(mixer, alone, [one[row : row + 1] for one in states], None)
        assert_same([part, *after], [y[row : row + 1, :length], *(n[row : row + 1] for n in new)])


def test_a_replayed_prefix_gives_the_states_of_that_prefix() -> None:
    rng = np.random.default_rng(2)
    mixer, inputs, states = mixer_of(), random_inputs(rng, 3, 6), random_states(rng, 3)
    for kept in ([0, 0, 0], [1, 6, 3], [6, 6, 6]):
        replayed = forward(mixer, inputs, states, mx.array(kept))[1]
        for row, length in enumerate(kept):
            before = [one[row : row + 1] for one in states]
            prefix = [one[row : row + 1, :length] for one in inputs]
            expected = forward(mixer, prefix, before, None)[1] if length else before
            assert_same([one[row : row + 1] for one in replayed], expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_states_of_narrow_activations_are_float32(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(3)
    (projected,), states = random_inputs(rng, 2, 5), random_states(rng, 2)
    for lengths in (None, mx.array([2, 5])):
        y, new = forward(mixer_of(dtype), [projected.astype(dtype)], states, lengths)
        wide, _ = forward(mixer_of(), [projected], states, lengths)
        assert y.dtype == dtype
        assert [one.dtype for one in new] == [mx.float32, mx.float32]
        np.testing.assert_allclose(np.array(y[:, :2].astype(mx.float32)), wide[:, :2], atol=0.1)
