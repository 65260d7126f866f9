"""Uniform numbers that depend on a request's seed and a token's index only. Knows no mlx.

SplitMix64 read as a counter-based generator (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014): the n-th number of a stream needs none of those before it, so a seeded
request draws the same numbers alone, in any batch, and after it was preempted.
"""

import secrets

import numpy as np
from numpy.typing import NDArray

# As arrays, which numpy takes up faster than scalars.
ONE, GOLDEN, MIX_1, MIX_2, SHIFT_1, SHIFT_2, SHIFT_3, LOW_BITS = np.array(
    [1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31, 40], np.uint64
)[:, None]
UNIT = np.array([2**-24], np.float32)


def stream_of(seed: int | None) -> int:
    """The 64-bit stream of a seed; without one, a stream nobody can repeat."""
    if seed is None:
        return secrets.randbits(64)
    return int(_mixed(np.array([seed % 2**64], dtype=np.uint64))[0])


def uniforms(streams: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number a row in [0, 1), a multiple of 2**-24: exact in float32 and never 1.

    Args:
        streams: (R,) what stream_of returned for each row.
        counts: (R,) index of the token that the number is for.
    """
    bits = counts.astype(np.uint64)
    bits += ONE
    bits *= GOLDEN
    bits += streams
    return (_mixed(bits) >> LOW_BITS).astype(np.float32) * UNIT


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What the generator makes of its states, in their place."""
    z ^= z >> SHIFT_1
    z *= MIX_1
    z ^= z >> SHIFT_2
    z *= MIX_2
    z ^= z >> SHIFT_3
    return z
