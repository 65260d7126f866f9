"""Uniform numbers that depend on a request's seed and a token's index only. Knows no mlx.

SplitMix64 read as a counter-based generator (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014): the n-th number of a stream needs none of those before it, so a seeded
request draws the same numbers alone, in any batch, and after it was preempted.
"""

import secrets

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_of(seed: int | None) -> int:
    """The 64-bit stream of a seed; without one, a stream nobody can repeat."""
    if seed is None:
        return secrets.randbits(64)
    return int(_mix(np.array([seed % 2**64], dtype=np.uint64))[0])


def uniforms(streams: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number a row in [0, 1), a multiple of 2**-24: exact in float32 and never 1.

    Args:
        streams: (R,) what stream_of returned for each row.
        counts: (R,) index of the token that the number is for.
    """
    bits = _mix(streams + (counts.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))
