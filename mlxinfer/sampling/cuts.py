"""Cuts beside top-k, top-p and min-p: top-n-sigma, typical sampling, and XTC. Draws no token.

They work on logits, and give -inf to tokens that are not kept, before one is chosen of the others.

Top-n-sigma keeps logits within n standard deviations of the highest (Tang et al., "Top-nσ: Not all
logits are you need", 2024). Typical sampling keeps the tokens with a surprise nearest the
entropy, up to a mass (Meister et al., "Locally typical sampling", 2022). XTC, with a probability at
each token, excludes all that reach a threshold but the least probable of them, of what the other
cuts have kept (P. E. Weidmann, "Exclude top choices", text-generation-webui, pull request 6335,
2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .draw import total_weight, uniforms
from .truncation import RankCuts, WeightCuts, kept_weights

EXCLUDING = np.uint64(0x3C6EF372FE94F82B)  # a stream of random numbers of its own
LOWEST = mx.finfo(mx.float32).min
# Of two allowed tokens the lower one lies exactly two deviations below the higher: without a
# margin the last bit of a sum would decide, which depends on what shares the step.
SIGMA_MARGIN = 1e-4


@dataclass(frozen=True, slots=True)
class SomeRows:
    """P of the R rows of a batch."""

    places: mx.array | None  # (P,) int32; None: all of it, in order

    def of(self, rows: mx.array) -> mx.array:
        """(R, ...) -> (P, ...)"""
        return rows if self.places is None else rows[self.places]

    def put(self, rows: mx.array, new: mx.array) -> mx.array:
        """The rows (R, ...) with new ones (P, ...) in these places."""
        if self.places is None:
            return new
        rows[self.places] = new
        return rows


@dataclass(frozen=True, slots=True)
class SigmaCuts:
    """Rows with top-n-sigma."""

    rows: SomeRows
    num_sigmas: mx.array  # (P, 1) float32

    def apply(self, logits: mx.array) -> mx.array:
        """(R, width) -> (R, width) float32; the deviation is that of tokens above -inf."""
        x = self.rows.of(logits)
        there = x > -mx.inf
        count = mx.maximum(total_weight(there.astype(mx.float32)), 1.0)
        mean = total_weight(mx.where(there, x, 0.0)) / count
        away = mx.where(there, x - mean, 0.0)
        sigma = mx.sqrt(total_weight(away * away) / count)
        reach = (self.num_sigmas + SIGMA_MARGIN) * sigma
        floor = x.max(axis=-1, keepdims=True) - reach
        return self.rows.put(logits, mx.where(x >= floor, x, -mx.inf))


@dataclass(frozen=True, slots=True)
class TypicalCuts:
    """Rows with typical sampling."""

    rows: SomeRows
    mass: mx.array  # (P, 1) float32
    temperature: mx.array  # (P, width) float32

    def apply(self, logits: mx.array) -> mx.array:
        """(R, width) -> (R, width) float32; equally typical tokens stay or go together."""
        x = self.rows.of(logits)
        scaled = (x - mx.maximum(x.max(axis=-1, keepdims=True), LOWEST)) / self.temperature
        weights = mx.exp(scaled)
        total = total_weight(weights)
        surprise = mx.log(total) - scaled  # of each token; inf where it has no mass
        share = weights / total
        entropy = total_weight(mx.where(share > 0, share * surprise, 0.0))
        away = mx.where(share > 0, mx.abs(surprise - entropy), mx.inf)
        order = mx.argsort(away, axis=-1)
        mass = mx.cumsum(mx.take_along_axis(share, order, axis=-1), axis=-1)
        count = (mass < self.mass).sum(axis=-1, keepdims=True)  # that are not enough
        last = mx.take_along_axis(order, mx.minimum(count, x.shape[-1] - 1), axis=-1)
        kept = (away <= mx.take_along_axis(away, last, axis=-1)) & (share > 0)
        return self.rows.put(logits, mx.where(kept, x, -mx.inf))


@dataclass(frozen=True, slots=True)
class ExcludingCuts:
    """Rows with XTC, in the order of `by_weight` and `by_rank`: what else cuts them comes first."""

    rows: SomeRows
    places: NDArray[np.int64]  # (P,) the same
    probability: NDArray[np.float32]  # (P,)
    threshold: mx.array  # (P, 1) float32
    streams: NDArray[np.uint64]  # (P,)
    by_weight: WeightCuts | None
    by_rank: RankCuts | None

    def apply(self, logits: mx.array, counts: NDArray[np.int64]) -> mx.array:
        """(R, width) -> (R, width) float32; counts (R,) index of the token of each row."""
        x = self.rows.of(logits)
        weights = kept_weights(x, self.by_weight, self.by_rank)
        there = weights > 0
        likely = there & (weights >= self.threshold * total_weight(weights))
        least = mx.where(likely, weights, mx.inf).min(axis=-1, keepdims=True)
        random = uniforms(self.streams ^ EXCLUDING, counts[self.places])
        now = mx.array((random < self.probability)[:, None])
        kept = there & ~(now & likely & (weights > least))
        return self.rows.put(logits, mx.where(kept, x, -mx.inf))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of a batch; None: no row has that one."""

    sigma: SigmaCuts | None
    typical: TypicalCuts | None
    excluding: ExcludingCuts | None

    def apply(self, logits: mx.array, counts: NDArray[np.int64]) -> mx.array:
        """(R, width) float32, padded -> the same; counts (R,) index of the token of each row."""
        if self.sigma is not None:
            logits = self.sigma.apply(logits)
        if self.typical is not None:
            logits = self.typical.apply(logits)
        if self.excluding is not None:
            logits = self.excluding.apply(logits, counts)
        return logits


def some_rows(places: Sequence[int] | NDArray[np.int64], num_rows: int) -> SomeRows:
    """The rows at these places of a batch of `num_rows`."""
    array = np.asarray(places, dtype=np.int32)
    whole = np.array_equal(array, np.arange(num_rows))
    return SomeRows(None if whole else mx.array(array))
