"""Eight- and four-bit floats, value by value from their definitions. No mlxinfer, no tables."""

import math

import numpy as np


def e4m3(code: int) -> float:
    """OCP E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1(code: int) -> float:
    """OCP E2M1: sign, 2 bits of exponent with bias 1, 1 of mantissa."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (2 + mantissa) * 2.0 ** (exponent - 2)


E4M3_VALUES = np.array([e4m3(code) for code in range(256)])
E2M1_VALUES = np.array([e2m1(code) for code in range(16)])


def finite_e4m3(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random codes that are numbers."""
    codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    codes[np.isnan(E4M3_VALUES[codes])] = 0x38
    return codes


def fp4_rows(octets: np.ndarray) -> np.ndarray:
    """(n, k) bytes -> (n, 2 k) values, the low half of a byte first."""
    return np.array([[e2m1(c) for b in row for c in (int(b) & 15, int(b) >> 4)] for row in octets])
