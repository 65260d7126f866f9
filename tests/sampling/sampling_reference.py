"""What sampling means, one row at a time in numpy: slow, plain, float64 from the logits on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxinfer.core import SamplingParams

NEAR = 1e-5  # share of the mass within which float32 may decide either way


@dataclass
class Row:
    """One request at one step."""

    params: SamplingParams
    logits: np.ndarray  # (V,)
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    stop_ids: frozenset[int] = frozenset()
    allowed: np.ndarray | None = None  # (V,) bool


def adjusted_logits(row: Row) -> np.ndarray:
    """Float32 logits after grammar, penalties, bias and bans."""
    params = row.params
    x = row.logits.astype(np.float32).copy()
    if row.allowed is not None:
        x[~row.allowed] = -np.inf
    if params.repetition_penalty != 1:
        strength = np.float32(params.repetition_penalty)
        for token in {*row.prompt_ids, *row.output_ids}:
            x[token] = x[token] / strength if x[token] > 0 else x[token] * strength
    for token, times in Counter(row.output_ids).items():
        x[token] -= np.float32(params.frequency_penalty) * np.float32(times)
        x[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    if len(row.output_ids) < params.min_tokens:
        x[list(row.stop_ids)] = -np.inf
    return x


def probabilities(x: np.ndarray, temperature: float) -> np.ndarray:
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        p = np.exp((x - x.max()) / temperature)
    return p / p.sum()


@dataclass
class Kept:
    """The tokens that may be drawn, and those that float32 may put on either side of a cut."""

    probabilities: np.ndarray  # (V,) of the kept ones, 0 elsewhere; sums to 1
    in_doubt: bool


def kept_tokens(row: Row) -> Kept:
    params = row.params
    x = adjusted_logits(row)
    p = probabilities(x, params.temperature)
    kept = p > 0
    in_doubt = False
    if 0 < params.top_k < len(x):
        kept &= x >= np.sort(x)[-params.top_k]
    if params.top_p < 1:
        p = np.where(kept, p, 0)
        p /= p.sum()
        floor, in_doubt = _nucleus_floor(p, params.top_p)
        kept &= p >= floor
    if params.min_p > 0:
        ratio = p / p.max()
        kept &= ratio >= params.min_p
        in_doubt |= bool((abs(ratio[p > 0] / params.min_p - 1) < NEAR).any()) and params.min_p < 1
    p = np.where(kept, p, 0)
    return Kept(p / p.sum(), in_doubt)


def _nucleus_floor(p: np.ndarray, top_p: float) -> tuple[float, bool]:
    """The smallest probability in the smallest set of mass top_p, and whether it is close."""
    mass, in_doubt = 0.0, False
    for value in np.unique(p)[::-1]:
        mass += value * (p == value).sum()
        in_doubt |= abs(mass - top_p) < NEAR  # equals stay together: only their ends can be close
        if mass >= top_p:
            return float(value), in_doubt
    return 0.0, True


def draw(p: np.ndarray, uniform: float) -> set[int]:
    """The tokens that a draw may give: one, or two neighbours where rounding decides."""
    mass = np.cumsum(p)
    candidates = set()
    for target in (uniform - NEAR, uniform, uniform + NEAR):
        above = np.flatnonzero((mass > min(max(target, 0), 1) * mass[-1]) & (p > 0))
        candidates.add(int(above[0]) if len(above) else int(np.flatnonzero(p)[-1]))
    return {t for t in range(min(candidates), max(candidates) + 1) if p[t] > 0}


def greedy(row: Row) -> int:
    return int(np.argmax(adjusted_logits(row)))


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
