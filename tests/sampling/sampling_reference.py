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
    breakers: frozenset[int] = frozenset()


def adjusted_logits(row: Row) -> np.ndarray:
    """Float32 logits after grammar, penalties, bias and bans."""
    params = row.params
    x = row.logits.astype(np.float32).copy()
    if row.allowed is not None:
        x[~row.allowed] = -np.inf
    if params.repetition_penalty != 1:
        strength = np.float32(params.repetition_penalty)
        before = [*row.prompt_ids, *row.output_ids]
        if params.repetition_window >= 0:
            before = before[max(len(before) - params.repetition_window, 0) :]
        for token in set(before):
            x[token] = x[token] / strength if x[token] > 0 else x[token] * strength
    for token, times in Counter(row.output_ids).items():
        x[token] -= np.float32(params.frequency_penalty) * np.float32(times)
        x[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    if len(row.output_ids) < params.min_tokens:
        x[list(row.stop_ids)] = -np.inf
    return x


def dried_logits(row: Row) -> np.ndarray:
    """The same after DRY."""
    params, x = row.params, adjusted_logits(row)
    for token, length in repeated_lengths(row).items():
        beyond = length - params.dry_allowed_length
        if beyond >= 0:
            with np.errstate(over="ignore"):
                amount = params.dry_multiplier * np.float64(params.dry_base) ** min(beyond, 1024)
            x[token] -= np.float32(min(amount, 1e30))
    return x


def repeated_lengths(row: Row) -> dict[int, int]:
    """By token that would continue a repetition: the length of the longest one, as DRY has it."""
    params, ids = row.params, [*row.prompt_ids, *row.output_ids]
    if not params.dry_multiplier or not params.dry_penalty_last_n:
        return {}
    if params.dry_penalty_last_n > 0:
        ids = ids[-params.dry_penalty_last_n :]
    lengths: dict[int, int] = {}
    for end in range(len(ids) - 1):  # the repeated part ends here
        length = 0
        while length <= end and ids[end - length] == ids[-1 - length] not in row.breakers:
            length += 1
        if length and ids[end + 1] not in row.breakers:
            lengths[ids[end + 1]] = max(lengths.get(ids[end + 1], 0), length)
    return lengths


def _cut_logits(x: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, bool]:
    """Logits after top-n-sigma and typical sampling, and whether a cut is close."""
    in_doubt = False
    if params.top_n_sigma:
        finite = x[np.isfinite(x)].astype(np.float64)
        floor = finite.max() - params.top_n_sigma * finite.std()
        in_doubt |= bool((abs(finite - floor) < NEAR * max(1, abs(finite).max())).any())
        x = np.where(x >= floor, x, -np.inf)
    if params.typical_p < 1:
        p = probabilities(x, params.temperature)
        surprise = -np.log(p[p > 0])
        away = np.full(len(x), np.inf)
        away[p > 0] = abs(surprise - (p[p > 0] * surprise).sum())
        away = np.round(away, 4)  # float32 may part what is equal, or join what is near
        order = np.argsort(away, kind="stable")
        mass = np.cumsum(p[order])
        last = int((mass < params.typical_p).sum())
        last = min(last, len(x) - 1)
        gaps = np.diff(np.unique(away[np.isfinite(away)]))
        in_doubt |= bool((abs(mass - params.typical_p) < 1e-4).any())
        in_doubt |= bool((gaps < 1e-3).any()) or 0 < p[p > 0].min() < 1e-30
        x = np.where((away <= away[order[last]]) & (p > 0), x, -np.inf)
    return x, in_doubt


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


def kept_tokens(row: Row, excludes: bool = False) -> Kept:
    """What may be drawn; `excludes`: XTC acts on this token."""
    params = row.params
    x, in_doubt = _cut_logits(dried_logits(row), params)
    p = probabilities(x, params.temperature)
    kept = p > 0
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
    p /= p.sum()
    if excludes:
        likely = p >= params.xtc_threshold
        in_doubt |= bool((abs(p[p > 0] - params.xtc_threshold) < NEAR).any())
        if likely.any():
            least = p[likely & (p > 0)].min(initial=np.inf)
            in_doubt |= bool((p > 0).any() and 0 < abs(p[p > 0] / least - 1).min() < NEAR)
            in_doubt |= least < 1e-30
            p = np.where(likely & (p > least * (1 + NEAR / 10)), 0, p)
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
    return int(np.argmax(dried_logits(row)))


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
