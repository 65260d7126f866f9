"""Windows over earlier tokens: what is behind the end of a shorter sequence is in no state."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache_specs import StateSpec
from mlxinfer.layers.attention import Mixer
from mlxinfer.layers.ngrams import CausalFilter, TokenWindow
from mlxinfer.layers.recurrent import CausalConv
from mlxinfer.layers.residual_conv import ResidualConv

CHANNELS, BEFORE, LONGEST = 4, 3, 5


class Part:
    """Sequences of LONGEST rows each, of which `lengths` count, behind `before`."""

    def __init__(self, before: mx.array, lengths: list[int] | None) -> None:
        self.before, self.lengths = before, None if lengths is None else mx.array(lengths)

    def recur(self, rows: list[mx.array], advance: Any) -> mx.array:
        parts = [mx.unflatten(x, 0, (len(self.before), -1)) for x in rows]
        y, (self.after,) = advance(parts, lambda: ([self.before], self.lengths), None)
        return y


def run(mixer: Mixer, x: mx.array, before: mx.array, lengths: list[int] | None = None) -> Any:
    """Outputs (B, L, ...) of rows (B, L, ...), and the states behind them."""
    part = Part(before, lengths)
    return mixer(mx.flatten(x, 0, 1), SimpleNamespace(caches={mixer: part})), part.after  # type: ignore[arg-type]


def spec(*shape: int) -> StateSpec:
    return StateSpec(((shape, "float32"),))


TAPS = mx.array(np.random.default_rng(0).normal(size=(BEFORE + 1, CHANNELS)), mx.float32)
MIXERS = [
    TokenWindow(spec(BEFORE)),
    CausalFilter(CausalConv(TAPS.T[..., None]), spec(BEFORE, CHANNELS)),
    ResidualConv(TAPS, spec(BEFORE, CHANNELS)),
]


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: type(mixer).__name__)
def test_rows_behind_the_end_are_in_no_state(mixer: Mixer) -> None:
    rng, lengths, of_ids = np.random.default_rng(1), [5, 0, 1, 4], type(mixer) is TokenWindow
    shape = () if of_ids else (CHANNELS,)
    x, before = (
        mx.array(rng.integers(1, 90, (4, count, *shape)), mx.int32 if of_ids else mx.float32)
        for count in (LONGEST, BEFORE)
    )
    y, after = run(mixer, x, before, lengths)
    for row, length in enumerate(lengths):
        state = before[row : row + 1]
        if length:
            part, state = run(mixer, x[row : row + 1, :length], state)
            np.testing.assert_allclose(np.array(y[row, :length]), np.array(part[0]), rtol=1e-5)
        assert mx.array_equal(after[row], state[0])
