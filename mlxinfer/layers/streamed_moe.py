"""Mixtures of experts: all experts are in files, and some of them are in memory too.

The matrices of experts in memory lie in slots, stacked as all matrices are elsewhere. A layer
reads the router's choice on the host, has the missing experts read into slots, and runs the same
products over slots. Where a step needs more experts than there are slots they come in waves, and
each token's experts are summed in the router's order even so: tokens are those of the resident run.
"""

from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .moe import SORT_FROM, ExpertProjection, MoE, Routed

Ints = NDArray[np.int32]


class Slots(Protocol):
    """The experts of one layer, some in slots."""

    @property
    def num_slots(self) -> int:
        """Experts that may be in memory at once; 2 at least."""

    def route(self, experts: Ints) -> Ints:
        """Note which experts (N, k) rows go to; returns them, each once."""

    def begin(self, wanted: Ints, keep: Ints) -> None:
        """Begin to read those of `wanted` that have no slot; both keep theirs."""

    def finish(self, wanted: Ints) -> Ints:
        """Wait until they are read; the slot of each expert (E,), valid for `wanted` only.

        Raises:
            CheckpointError: a file became shorter, or its disk fails.
        """

    def read_by(self, y: mx.array) -> None:
        """Nothing is written to slots from now on until `y` is computed."""

    def expect(self, experts: Ints) -> None:
        """Experts (N, k) that rows may go to next: a guess, for reads while others compute."""


class SlotProjection:
    """An `ExpertProjection` over slots.

    Attributes:
        over_slots: it; set once the slots are there.
    """

    __slots__ = ("over_slots",)

    def __init__(self) -> None:
        self.over_slots: ExpertProjection | None = None

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its slots (...) as experts -> (..., 1, out_dims)."""
        assert self.over_slots is not None
        return self.over_slots(x, routed)


class StreamedMoE(MoE):
    """A mixture with experts that are read when tokens need them.

    Attributes:
        following: the mixture of a later layer; its router guesses from what this one reads;
            None: there is none.
    """

    __slots__ = ("_guess", "following", "slots")

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.slots: Slots | None = None  # set once they are there
        self.following: StreamedMoE | None = None
        self._guess: mx.array | None = None

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        if self.following is not None:
            self._guess = self.following.choose(self.following.router(x))[1]
        return super().__call__(x, residual)

    def _outputs(self, x: mx.array, experts: mx.array, rows_per_token: int = 1) -> mx.array:
        slots, guess, self._guess = self.slots, self._guess, None
        assert slots is not None
        mx.eval([experts] if guess is None else [experts, guess])
        chosen = np.array(experts).astype(np.int32)
        wanted = slots.route(chosen)
        if len(wanted) > slots.num_slots:
            return self._in_waves(slots, x, chosen, wanted, rows_per_token)
        slots.begin(wanted, wanted[:0])
        places = slots.finish(wanted)[chosen]
        if guess is not None and self.following is not None and self.following.slots is not None:
            self.following.slots.expect(np.array(guess).astype(np.int32))
        y = super()._outputs(x, mx.array(places), rows_per_token)
        slots.read_by(y)
        return y

    def _in_waves(
        self, slots: Slots, x: mx.array, chosen: Ints, wanted: Ints, rows_per_token: int
    ) -> mx.array:
        """The same with fewer slots than experts: one wave computes while the next is read."""
        num_rows, k = chosen.shape
        size = slots.num_slots // 2
        waves = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        pairs, outputs = [], []
        slots.begin(waves[0], wanted[:0])
        for wave, following in zip(waves, [*waves[1:], None], strict=True):
            places = slots.finish(wave)
            in_wave = np.flatnonzero(np.isin(chosen, wave))  # pairs, row by row
            in_wave = in_wave[np.argsort(places[chosen.flat[in_wave]], kind="stable")]
            in_slots = mx.array(places[chosen.flat[in_wave]])
            routed = Routed(in_slots, chosen.size >= SORT_FROM, k, rows_per_token)
            y = self._run(x[mx.array(in_wave // k)][:, None], routed)[:, 0]  # (pairs, hidden)
            if following is not None:
                slots.begin(following, wave)
            mx.eval(y)
            pairs.append(in_wave)
            outputs.append(y)
        order = mx.array(np.argsort(np.concatenate(pairs)))
        return mx.unflatten(mx.concatenate(outputs)[order], 0, (num_rows, k))
