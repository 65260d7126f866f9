"""What sampling means, one row at a time in float64: the tokens that a correct sampler may choose.

More than one only where a mass is so close to a cut, or to the drawn share, that rounding decides.
"""

from itertools import product

import numpy as np
from numpy.typing import NDArray

from mlxinfer.sampling.draw import uniforms

NEAR = 1e-5  # share of the mass within which rounding may decide either way

Floats = NDArray[np.floating]


def possible_tokens(logits: Floats, row: np.void) -> set[int]:
    """logits (V,) float32, with -inf where a mask forbids; row: SETTINGS."""
    x = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    if row["temperature"] == 0 or not np.isfinite(x.max()):
        return {int(np.argmax(x))}
    uniform = float(uniforms(row["stream"][None], row["count"][None].astype(np.int64))[0])
    near, exact = (-NEAR, 0, NEAR), (0,)
    moves = product(near, near if row["top_p"] < 1 else exact, near if row["min_p"] else exact)
    return {_token(x, row, uniform + u, 1 + p, 1 + m) for u, p, m in moves}


def kept_tokens(logits: Floats, row: np.void) -> set[int]:
    """Those with a chance above rounding."""
    probabilities = _kept(logits.astype(np.float64), row, 1, 1)
    return set(np.flatnonzero(probabilities > 1e-9).tolist())


def _token(x: Floats, row: np.void, uniform: float, top_p: float, min_p: float) -> int:
    mass = np.cumsum(_kept(x, row, top_p, min_p))
    return int(np.argmax(mass > min(max(uniform, 0), 1 - 1e-12) * mass[-1]))


def _kept(x: Floats, row: np.void, top_p: float, min_p: float) -> Floats:
    with np.errstate(over="ignore"):
        p = np.exp((x - x.max()) / float(row["temperature"]))
    if 0 < row["top_k"] < len(x):
        p[x < np.sort(x)[-int(row["top_k"])]] = 0
    if row["top_p"] < 1:
        values, counts = np.unique(np.where(p > 0, x, -np.inf), return_inverse=True)
        masses = np.bincount(counts, p)[::-1]
        enough = np.cumsum(masses) >= float(row["top_p"]) * top_p * p.sum()
        p[x < values[::-1][np.argmax(enough) if enough.any() else -1]] = 0
    p[p < min(float(row["min_p"]) * min_p, 1)] = 0
    return p / p.sum()
