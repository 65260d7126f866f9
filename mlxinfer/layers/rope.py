"""Rotary position embedding of a flat list of tokens. Knows positions, not sequences.

A model calls `prepare` once a step for each distinct rope and hands the result to every layer.
Where there is Metal that is the positions themselves, for MLX's fused kernel; elsewhere, where the
fused operation falls apart into twenty small ones, it is the tables of cosines and sines.
"""

from typing import Any, Protocol

import mlx.core as mx

from .frequencies import RopeSpec, inverse_frequencies


class Rope(Protocol):
    """Turns the leading `dims` of every head by its token's position."""

    def prepare(self, positions: mx.array) -> Any:
        """Positions (T,) int32 to what `__call__` wants of them."""
        ...

    def __call__(self, x: mx.array, prepared: Any) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        ...


def make_rope(spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> Rope:
    """The rope that is cheapest on this machine.

    An attention factor on whole heads is left to the attention scale (`scale_factor`).
    """
    if mx.metal.is_available():
        return FusedRope(spec, head_dim, dtype)
    return TableRope(spec, head_dim, dtype)


def scale_factor(spec: RopeSpec, head_dim: int) -> float:
    """What the attention scale is multiplied with: (a q)·(a k) is a² q·k where all of q turns."""
    return spec.attention_factor**2 if spec.dims == head_dim else 1.0


class FusedRope:
    """One kernel a call: `mx.fast.rope` with one offset per token."""

    __slots__ = ("dims", "freqs", "magnitudes")

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> None:
        self.dims = spec.dims
        self.freqs = 1 / mx.array(inverse_frequencies(spec), mx.float32)
        self.magnitudes = _magnitudes(spec, head_dim, dtype)

    def prepare(self, positions: mx.array) -> mx.array:
        """The positions (T,) themselves."""
        return positions

    def __call__(self, x: mx.array, prepared: mx.array) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        if self.magnitudes is not None:
            x = x * self.magnitudes
        turned = mx.fast.rope(
            x[:, :, None],
            self.dims,
            traditional=False,
            base=None,
            scale=1.0,
            offset=prepared,
            freqs=self.freqs,
        )
        return turned.squeeze(2)


class TableRope:
    """x cos + rotate(x) sin, with tables as wide as the head and computed once a step."""

    __slots__ = ("cuts", "dtype", "frequencies", "magnitudes", "signs")

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> None:
        half, rest = spec.dims // 2, head_dim - spec.dims
        turning = inverse_frequencies(spec)
        self.frequencies = mx.array(turning + turning + [0.0] * rest, mx.float32)  # (head_dim,)
        self.signs = mx.array([-1.0] * half + [1.0] * half + [0.0] * rest, mx.float32)
        self.cuts = [half, spec.dims] if rest else [half]
        self.magnitudes = _magnitudes(spec, head_dim, mx.float32)
        self.dtype = dtype

    def prepare(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Positions (T,) to cosines and signed sines, each (T, 1, head_dim)."""
        angles = positions[:, None, None] * self.frequencies
        cosines, sines = mx.cos(angles), mx.sin(angles) * self.signs
        if self.magnitudes is not None:
            cosines, sines = cosines * self.magnitudes, sines * self.magnitudes
        return cosines.astype(self.dtype), sines.astype(self.dtype)

    def __call__(self, x: mx.array, prepared: tuple[mx.array, mx.array]) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        cosines, sines = prepared
        first, second, *rest = mx.split(x, self.cuts, axis=-1)
        return x * cosines + mx.concatenate([second, first, *rest], axis=-1) * sines


def _magnitudes(spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> mx.array | None:
    """(head_dim,) factors where only a part of the head turns and is scaled; else None."""
    if spec.attention_factor == 1.0 or spec.dims == head_dim:
        return None
    rest = head_dim - spec.dims
    return mx.array([spec.attention_factor] * spec.dims + [1.0] * rest, dtype)
