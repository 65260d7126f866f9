"""Rotary position embedding of a flat list of tokens, and its frequencies.

Pair i of a head rotates by `position * frequency[i]`. If a context was stretched after training,
the slow pairs rotate slower. Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595),
YaRN (2309.00071), LongRoPE (2402.13753), M-RoPE (2409.12191), and the smoothing that Llama 3.1
published with its weights.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .step import Rope, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One way to encode positions, as a config states it. Layers of equal specs share a rope."""

    dims: int  # dimensions of a head that rotate, the first ones; even
    # The last ones rotate instead, and neighbours are pairs; else those that are dims / 2 apart.
    last: bool = False
    theta: float = 10000.0
    kind: str = "default"  # "default" | "linear" | "llama3" | "yarn" | "longrope" | "proportional"
    factor: float = 1.0  # how far the context was stretched
    original_context: int = 8192  # tokens the model was first trained with
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: turns over the original context above which a pair is kept
    beta_slow: float = 1.0  # yarn: turns below which a pair is slowed by `factor`
    truncate: bool = True  # yarn: round the range between the two to whole pairs
    pair_factors: tuple[float, ...] = ()  # longrope: how far each pair was stretched
    num_unrotated: int = 0  # proportional: pairs, the slowest ones, that do not rotate
    attention_factor: float = 1.0  # multiplies rotated numbers
    long: "RopeSpec | None" = None  # of sequences that may outgrow the original context; None: this
    sections: tuple[int, ...] = ()  # M-RoPE: pairs that rotate by time, row and column; empty: one
    interleaved: bool = False  # M-RoPE: time, row and column take turns; else one after the other

    @property
    def num_axes(self) -> int:
        """Positions of a token: 3 with M-RoPE, else 1."""
        return max(len(self.sections), 1)

    def pair_axes(self) -> list[int]:
        """The axis of the positions by which each of the `dims // 2` pairs rotates."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        axes = enumerate(i % 3 for i in range(self.dims // 2))
        return [axis if i < 3 * self.sections[axis] else 0 for i, axis in axes]

    def variant(self, max_tokens: int) -> int:
        """1 for a sequence that may grow to `max_tokens` and takes `long`; else 0."""
        return int(self.long is not None and max_tokens > self.original_context)


class FusedRope:
    """One kernel a call: `mx.fast.rope` with one offset per token.

    An attention factor on whole heads is left to the attention scale, see `scale_factor`.
    """

    __slots__ = ("dims", "freqs", "magnitudes", "neighbours")

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> None:
        skipped = head_dim - spec.dims if spec.last else 0  # dimensions before those that rotate
        self.dims = spec.dims + skipped
        self.neighbours = spec.last
        self.freqs = 1 / mx.array([0.0] * (skipped // 2) + inverse_frequencies(spec), mx.float32)
        self.magnitudes = magnitudes(spec, head_dim, dtype)

    def backwards(self) -> "FusedRope":
        part = copy(self)
        part.freqs = -self.freqs
        return part

    def some(self, pairs: mx.array) -> "FusedRope":
        """This rope for the chosen pairs (dims / 2,) alone: the others do not rotate.

        Nothing is scaled: the factor of the spec is to be applied once.
        """
        part = copy(self)
        part.freqs, part.magnitudes = mx.where(pairs, self.freqs, mx.inf), None
        return part

    def prepare(self, positions: mx.array, variants: Rows | None = None) -> mx.array:
        """The positions (T,) themselves."""
        return positions

    def __call__(self, x: mx.array, prepared: mx.array) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        if self.magnitudes is not None:
            x = x * self.magnitudes
        rotated = mx.fast.rope(
            x[:, :, None],
            self.dims,
            traditional=self.neighbours,
            base=None,
            scale=1.0,
            offset=prepared,
            freqs=self.freqs,
        )
        return rotated.squeeze(2)


class MultiRope:
    """M-RoPE: each pair rotates by one of a token's three positions: time, row or column.

    Tokens of text have three equal positions. A step with such tokens only gives one position for
    each, and runs the plain rope. Otherwise one rope for each axis rotates its own pairs, and
    leaves the others as they are. So a token with three equal positions gets the numbers of the
    plain rope.
    """

    __slots__ = ("by_axis", "plain")

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> None:
        self.plain = FusedRope(spec, head_dim, dtype)
        axes = mx.array(spec.pair_axes())
        self.by_axis = [self.plain.some(axes == axis) for axis in range(spec.num_axes)]

    def prepare(self, positions: mx.array, variants: Rows | None = None) -> list[mx.array]:
        """The positions (T,) alone, or (T,) of each axis."""
        return [positions] if positions.ndim == 1 else list(positions)

    def __call__(self, x: mx.array, prepared: list[mx.array]) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        if len(prepared) == 1:
            return self.plain(x, prepared[0])
        if self.plain.magnitudes is not None:
            x = x * self.plain.magnitudes
        for rope, positions in zip(self.by_axis, prepared, strict=True):
            x = rope(x, positions)
        return x


@dataclass(slots=True, eq=False)
class LongRope:
    """Two ropes; each sequence takes the rope of its own variant (arXiv 2402.13753).

    If all sequences of a step have one variant, it runs one rope. Otherwise it runs both, and takes
    the tokens of each variant from its rope.
    """

    short: Rope
    long: Rope

    def prepare(self, positions: mx.array, variants: Rows | None = None) -> Any:
        """The prepared short and long rope (None if no token takes it), and the choice (T,)."""
        num_long = 0 if variants is None else int(np.count_nonzero(variants))
        short = long = chosen = None
        if num_long < positions.shape[0]:
            short = self.short.prepare(positions)
        if num_long:
            long = self.long.prepare(positions)
        if variants is not None and short is not None and long is not None:
            chosen = mx.array(variants)[:, None, None] != 0
        return short, long, chosen

    def __call__(self, x: mx.array, prepared: Any) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        short, long, chosen = prepared
        if long is None:
            return self.short(x, short)
        if short is None:
            return self.long(x, long)
        return mx.where(chosen, self.long(x, long), self.short(x, short))


def rope_of(spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> Rope:
    if spec.sections:
        return MultiRope(spec, head_dim, dtype)
    rope = FusedRope(spec, head_dim, dtype)
    return rope if spec.long is None else LongRope(rope, FusedRope(spec.long, head_dim, dtype))


@dataclass(slots=True, eq=False)
class QueryScale:
    """Queries grow with the logarithm of their position, as in Llama 4.

    The factor is 1 + slope * log(1 + floor((position + offset) / period)).
    """

    slope: float
    period: int  # tokens
    offset: int = 0

    def prepare(self, positions: mx.array, variants: Rows | None = None) -> mx.array:
        """Factors (T, 1, 1) float32 of positions (T,)."""
        periods = (positions + self.offset) // self.period
        return (1 + self.slope * mx.log1p(periods.astype(mx.float32)))[:, None, None]

    def __call__(self, x: mx.array, prepared: mx.array) -> mx.array:
        """Queries (T, heads, head_dim) to the same shape."""
        return x * prepared.astype(x.dtype)


def rotary_order(num_heads: int, before: int, rotary: int, width: int) -> list[int]:
    """Outputs of heads that have rotary pairs side by side, with pairs half a part apart.

    Args:
        before: numbers of a head before its rotary part.
        rotary: numbers of that part.
        width: numbers of a head.
    """
    end = before + rotary
    head = [*range(before), *range(before, end, 2), *range(before + 1, end, 2), *range(end, width)]
    return [number * width + place for number in range(num_heads) for place in head]


def scale_factor(spec: RopeSpec, head_dim: int) -> float:
    """Factor on the attention scale: (a q)·(a k) is a² q·k where all of the head rotates."""
    return spec.attention_factor**2 if spec.dims == head_dim else 1.0


def magnitudes(spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> mx.array | None:
    """(head_dim,) factors where only a part of the head rotates and is scaled; else None."""
    if spec.attention_factor == 1.0 or spec.dims == head_dim:
        return None
    factors, rest = [spec.attention_factor] * spec.dims, [1.0] * (head_dim - spec.dims)
    return mx.array(rest + factors if spec.last else factors + rest, dtype)


def inverse_frequencies(spec: RopeSpec) -> list[float]:
    """Radians per token of each of the `spec.dims // 2` pairs."""
    plain = [spec.theta ** (-2 * i / spec.dims) for i in range(spec.dims // 2)]
    match spec.kind:
        case "linear":
            return [f / spec.factor for f in plain]
        case "llama3":
            return [_llama3(f, spec) for f in plain]
        case "yarn":
            return _yarn(plain, spec)
        case "proportional":
            rotated = len(plain) - spec.num_unrotated
            return [f / spec.factor if i < rotated else 0.0 for i, f in enumerate(plain)]
        case "longrope":
            return [f / factor for f, factor in zip(plain, spec.pair_factors, strict=True)]
    assert spec.kind == "default", spec.kind
    return plain


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The factor of rotated queries and keys in YaRN, if the config does not state one."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's correction for the growing entropy of attention over a stretched context."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequency: float, spec: RopeSpec) -> float:
    turns = spec.original_context * frequency / (2 * math.pi)
    if turns < spec.low_freq_factor:
        return frequency / spec.factor
    if turns > spec.high_freq_factor:
        return frequency
    share = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    return (1 - share) * frequency / spec.factor + share * frequency


def _yarn(plain: list[float], spec: RopeSpec) -> list[float]:
    low, high = _pair_at(spec.beta_fast, spec), _pair_at(spec.beta_slow, spec)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    width = high - low or 0.001  # the ramp of a single step still needs a slope
    frequencies = []
    for i, f in enumerate(plain):
        slowed = min(max((i - low) / width, 0.0), 1.0)
        frequencies.append(slowed * f / spec.factor + (1 - slowed) * f)
    return frequencies


def _pair_at(turns: float, spec: RopeSpec) -> float:
    """The (fractional) pair that turns this often over the original context."""
    wavelength = spec.original_context / (turns * 2 * math.pi)
    return spec.dims * math.log(wavelength) / (2 * math.log(spec.theta))
