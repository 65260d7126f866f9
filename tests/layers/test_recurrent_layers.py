"""Gated DeltaNet and Mamba-2: any split of a sequence, alone or beside others, gives the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache_specs import StateSpec
from mlxinfer.layers.gated_delta import GatedDeltaNet
from mlxinfer.layers.linear import Linear
from mlxinfer.layers.mamba2 import Mamba2
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.layers.recurrence_check import TOLERANCE, DeltaShape, difference
from mlxinfer.layers.recurrent import CausalConv, RecurrentMixer
from mlxinfer.layers.step import Arrays

HIDDEN, HEADS, LENGTH = 20, 6, 4


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32))


def gated_delta(dtype: mx.Dtype = mx.float32) -> GatedDeltaNet:
    rng, key_heads, key, value = np.random.default_rng(0), 2, 8, 5
    channels = 2 * key_heads * key + HEADS * value
    return GatedDeltaNet(
        in_proj=Linear(normal(rng, channels + HEADS * value + 2 * HEADS, HIDDEN)),
        out_proj=Linear(normal(rng, HIDDEN, HEADS * value)),
        conv=CausalConv(normal(rng, channels, LENGTH, 1).astype(dtype)),
        norm=RMSNorm(normal(rng, value), 1e-6),
        log_rate=normal(rng, HEADS),
        step_bias=normal(rng, HEADS),
        spec=states_of(channels, value, key),
    )


def mamba2(dtype: mx.Dtype = mx.float32) -> Mamba2:
    rng, groups, head, state = np.random.default_rng(0), 2, 5, 7
    inner = HEADS * head
    channels = inner + 2 * groups * state
    return Mamba2(
        in_proj=Linear(normal(rng, inner + channels + HEADS, HIDDEN)),
        out_proj=Linear(normal(rng, HIDDEN, inner)),
        conv=CausalConv(
            normal(rng, channels, LENGTH, 1).astype(dtype), normal(rng, channels).astype(dtype)
        ),
        norm=RMSNorm(normal(rng, groups, inner // groups), 1e-6),
        num_groups=groups,
        log_rate=normal(rng, HEADS) - 2,
        step_bias=normal(rng, HEADS),
        skip=normal(rng, HEADS),
        step_limits=(0.0, float("inf")),
        spec=states_of(channels, head, state),
    )


def states_of(channels: int, *state: int) -> StateSpec:
    return StateSpec((((LENGTH - 1, channels), "float32"), ((HEADS, *state), "float32")))


@dataclass(frozen=True)
class Kind:
    """A recurrent layer, how many numbers of a token it reads, and how far its results differ."""

    make: Callable[..., RecurrentMixer]
    width: int
    apart: float
    apart_at_ends: float
    tokens: int  # of a sequence that is split: more than one chunk

    def inputs(self, rng: np.random.Generator, batch: int, length: int) -> Arrays:
        return [normal(rng, batch, length, self.width)]

    def states(self, rng: np.random.Generator, batch: int) -> Arrays:
        return [normal(rng, batch, *shape) for shape, _ in self.make().spec.shapes]


GATED_DELTA = Kind(gated_delta, 62 + 30 + 12, apart=0, apart_at_ends=0, tokens=17)
MAMBA2 = Kind(mamba2, 30 + 58 + 6, apart=2e-4, apart_at_ends=2e-5, tokens=90)
both = pytest.mark.parametrize("kind", [GATED_DELTA, MAMBA2], ids=["gated delta", "mamba 2"])


def assert_same(left: Sequence[mx.array], right: Sequence[mx.array], apart: float) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=apart / 20, atol=apart)


@both
@pytest.mark.parametrize("seed", range(4))
def test_any_split_of_a_sequence_gives_the_same(kind: Kind, seed: int) -> None:
    rng, draw, mixer = np.random.default_rng(seed), Random(seed), kind.make()
    inputs, states = kind.inputs(rng, 2, kind.tokens), kind.states(rng, 2)
    y, new = mixer.in_mlx(inputs, states, None)
    cuts = sorted({0, kind.tokens, *draw.sample(range(1, kind.tokens), draw.randint(1, 16))})
    parts = []
    for start, stop in pairwise(cuts):
        part, states = mixer.in_mlx([one[:, start:stop] for one in inputs], states, None)
        parts.append(part)
    assert_same([mx.concatenate(parts, axis=1), *states], [y, *new], kind.apart)


@both
@pytest.mark.parametrize("seed", range(4))
def test_each_sequence_of_a_ragged_batch_is_as_alone(kind: Kind, seed: int) -> None:
    """Tokens behind its end change nothing, and one of no tokens keeps its states."""
    rng, draw, mixer = np.random.default_rng(seed), Random(seed), kind.make()
    inputs, states = kind.inputs(rng, 5, 8), kind.states(rng, 5)
    kept = [0, 8, *(draw.randint(1, 8) for _ in range(3))]
    y, new = mixer.in_mlx(inputs, states, mx.array(kept))
    for row, length in enumerate(kept):
        before, after = ([one[row : row + 1] for one in part] for part in (states, new))
        if not length:
            assert_same(after, before, 0)
            continue
        prefix = [one[row : row + 1, :length] for one in inputs]
        part, alone = mixer.in_mlx(prefix, before, None)
        assert_same([y[row : row + 1, :length], *after], [part, *alone], kind.apart_at_ends)
        noise = [mx.concatenate([one, one * 7 + 1], axis=1) for one in prefix]
        again = mixer.in_mlx(noise, before, mx.array([length]))[1]
        assert_same(again, after, kind.apart_at_ends)


@both
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_states_of_narrow_activations_are_float32(kind: Kind, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(3)
    (projected,), states = kind.inputs(rng, 2, 5), kind.states(rng, 2)
    for lengths in (None, mx.array([2, 5])):
        y, new = kind.make(dtype).in_mlx([projected.astype(dtype)], states, lengths)
        assert [one.dtype for one in new] == [mx.float32, mx.float32]
        if kind is GATED_DELTA:
            wide, _ = kind.make().in_mlx([projected], states, lengths)
            assert y.dtype == dtype
            np.testing.assert_allclose(np.array(y[:, :2].astype(mx.float32)), wide[:, :2], atol=0.1)


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
