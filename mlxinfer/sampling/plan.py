"""The sampling plan of a batch: everything that stays the same while its rows do.

Rows are grouped by the work that their settings need, so that no row takes part in work that only
another asked for: greedy, drawn from all tokens, drawn after top-p alone (a sort of the row), drawn
after top-k. A batch is sorted by group before its tokens are chosen, and put back in order after.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from ..metal_kernels.sample import SETTINGS
from .adjustments import TINY, Biases, Penalties, Repetition, SparseBias, strength_of
from .cuts import Cuts, ExcludingCuts, SigmaCuts, TypicalCuts, some_rows
from .draw import padded_width, row_padding, stream_of
from .dry import Dry, DryHistory, dry_rows
from .logprobs import LogprobRows, logprob_rows
from .truncation import RankCuts, WeightCuts
from .window import WindowHistory, Windows, window_rows

GREEDY, PLAIN, TOP_P, TOP_K = range(4)
KEEP_ALL = 2.0  # a top_p that no mass reaches, whatever the rounding

ROW = np.dtype(
    [
        ("kind", np.int8),
        ("stream", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("penalised", np.bool_),  # over all tokens; a window of the last ones is apart
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("sigmas", np.float32),  # of top-n-sigma; 0: off, as are the next three
        ("typical", np.float32),
        ("xtc", np.float32),  # probability
        ("xtc_threshold", np.float32),
        ("logprobs", np.int32),  # -1: none asked for
    ]
)
NO_HISTORIES: Mapping[int, DryHistory] = {}
NO_WINDOWS: Mapping[int, WindowHistory] = {}
K_STEP = 64  # top_k is rounded up to this: whole vectors, and few shapes


def row_of(params: SamplingParams, vocab_size: int) -> tuple[object, ...]:
    """The settings of a request as one ROW."""
    top_k = params.top_k if params.top_k < vocab_size else 0
    top_p = float(np.float32(params.top_p))  # 1 - 1e-12 is 1, and so off
    if params.greedy:
        kind = GREEDY
    elif top_k > 0:
        kind = TOP_K
    else:
        kind = TOP_P if top_p < 1 else PLAIN
    repeats = params.repetition_penalty != 1 and params.repetition_window < 0
    return (
        kind,
        stream_of(params.seed),
        max(params.temperature, TINY),
        top_k,
        top_p if top_p < 1 else KEEP_ALL,
        params.min_p,
        repeats or params.presence_penalty != 0 or params.frequency_penalty != 0,
        strength_of(params) if repeats else 1.0,
        params.presence_penalty,
        params.frequency_penalty,
        0.0 if params.greedy else params.top_n_sigma,
        params.typical_p if params.typical_p < 1 and not params.greedy else 0.0,
        0.0 if params.greedy else params.xtc_probability,
        params.xtc_threshold,
        -1 if params.logprobs is None else params.logprobs,
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """The D rows that are drawn, group after group."""

    places: NDArray[np.int64]  # (D,) in the batch
    streams: NDArray[np.uint64]  # (D,)
    by_weight: WeightCuts | None
    by_rank: RankCuts | None  # of the last group


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What the sampler does for R rows with these slots, in every step of the same batch."""

    slots: tuple[int, ...]
    order: mx.array | None  # (R,) int32 rows by group; None: they are in this order already
    places: mx.array | None  # (R,) int32 where each row is in that order
    num_greedy: int  # the first rows by group: their most probable token is taken
    drawn: Drawn | None  # the others; None: all are greedy
    penalties: Penalties | None
    biases: Biases | None
    dry: Dry | None
    windows: Windows | None
    cuts: Cuts | None
    logprobs: LogprobRows | None
    settings: NDArray[np.void]  # (R,) SETTINGS for the Metal kernel, counts left out
    width: int  # of padded rows
    padding: mx.array  # see row_padding
    adjusts: bool  # whether any row has penalties, biases, DRY or one of `cuts`


def make_plan(
    slots: tuple[int, ...],
    table: NDArray[np.void],
    biases: Mapping[int, SparseBias],
    prompts: Mapping[int, mx.array],
    vocab_size: int,
    dry: Mapping[int, DryHistory] = NO_HISTORIES,
    windows: Mapping[int, WindowHistory] = NO_WINDOWS,
) -> SamplingPlan:
    """The plan of a batch.

    Args:
        slots: (R,) of its rows.
        table: ROWs by slot.
        biases: by slot, of those that have any.
        prompts: prompt_mask by slot, of those that have a repetition penalty over all tokens.
        vocab_size: V
        dry: by slot, of those that have DRY.
        windows: by slot, of those with a repetition penalty over their last tokens.
    """
    rows = table[list(slots)]
    cuts = _cuts(rows, vocab_size)
    _leave_to_cuts(rows)
    places = [np.flatnonzero(rows["kind"] == kind) for kind in (GREEDY, PLAIN, TOP_P, TOP_K)]
    order = np.concatenate(places)
    in_order = bool((order[1:] > order[:-1]).all())
    asked = np.flatnonzero(rows["logprobs"] >= 0).tolist()
    biased = [place for place, slot in enumerate(slots) if slot in biases]
    dried = dry_rows(slots, dry, vocab_size) if dry else None
    windowed = window_rows(slots, windows) if windows else None
    penalised = bool(biased) or bool(rows["penalised"].any())
    return SamplingPlan(
        slots=slots,
        order=None if in_order else _ints(order),
        places=None if in_order else _ints(np.argsort(order)),
        num_greedy=len(places[0]),
        drawn=_drawn(rows, places[1:], vocab_size) if len(places[0]) < len(rows) else None,
        penalties=_penalties(rows, np.array(slots), prompts, vocab_size),
        biases=Biases(biased, [biases[slots[place]] for place in biased], vocab_size)
        if biased
        else None,
        dry=dried,
        windows=windowed,
        cuts=cuts,
        logprobs=logprob_rows(asked, rows["logprobs"][asked].tolist()) if asked else None,
        settings=_settings(rows),
        width=padded_width(vocab_size),
        padding=row_padding(len(rows), vocab_size),
        adjusts=penalised or any(part is not None for part in (dried, windowed, cuts)),
    )


def _cuts(rows: NDArray[np.void], vocab_size: int) -> Cuts | None:
    """What top-n-sigma, typical sampling and XTC do to these rows; None: nothing."""
    sigma, typical = np.flatnonzero(rows["sigmas"]), np.flatnonzero(rows["typical"])
    excluding = _excluding(rows, vocab_size)
    if not len(sigma) and not len(typical) and excluding is None:
        return None
    count = len(rows)
    return Cuts(
        sigma=SigmaCuts(some_rows(sigma, count), _column(rows["sigmas"][sigma]))
        if len(sigma)
        else None,
        typical=TypicalCuts(
            some_rows(typical, count),
            _column(rows["typical"][typical]),
            _across(rows["temperature"][typical], vocab_size),
        )
        if len(typical)
        else None,
        excluding=excluding,
    )


def _excluding(rows: NDArray[np.void], vocab_size: int) -> ExcludingCuts | None:
    """The rows with XTC, group by group."""
    groups = [np.flatnonzero((rows["xtc"] > 0) & (rows["kind"] == k)) for k in range(1, 4)]
    places = np.concatenate(groups)
    if not len(places):
        return None
    plain, top_p, top_k = (rows[group] for group in groups)
    return ExcludingCuts(
        rows=some_rows(places, len(rows)),
        places=places,
        probability=rows["xtc"][places],
        threshold=_column(rows["xtc_threshold"][places]),
        streams=rows["stream"][places],
        by_weight=_weight_cuts(plain, top_p, vocab_size) if len(plain) + len(top_p) else None,
        by_rank=_rank_cuts(top_k, vocab_size) if len(top_k) else None,
    )


def _leave_to_cuts(rows: NDArray[np.void]) -> None:
    """Rows with XTC are drawn from all that it keeps: it has done what else cuts them."""
    excluding = rows["xtc"] > 0
    for name, off in (("kind", PLAIN), ("top_k", 0), ("top_p", KEEP_ALL), ("min_p", 0)):
        rows[name][excluding] = off


def _settings(rows: NDArray[np.void]) -> NDArray[np.void]:
    settings = np.zeros(len(rows), SETTINGS)
    for name in ("top_k", "top_p", "min_p", "stream"):
        settings[name] = rows[name]
    settings["temperature"] = np.where(rows["kind"] == GREEDY, 0, rows["temperature"])
    return settings


def _drawn(rows: NDArray[np.void], groups: Sequence[NDArray[np.int64]], vocab_size: int) -> Drawn:
    places = np.concatenate(groups)
    plain, top_p, top_k = (rows[group] for group in groups)
    return Drawn(
        places=places,
        streams=rows["stream"][places],
        by_weight=_weight_cuts(plain, top_p, vocab_size) if len(plain) + len(top_p) else None,
        by_rank=_rank_cuts(top_k, vocab_size) if len(top_k) else None,
    )


def _weight_cuts(plain: NDArray[np.void], top_p: NDArray[np.void], vocab_size: int) -> WeightCuts:
    temperature = np.concatenate([plain["temperature"], top_p["temperature"]])
    cuts_plain = len(plain) > 0 and (len(top_p) > 0 or plain["min_p"].any())
    return WeightCuts(
        temperature=_across(temperature, vocab_size),
        floor=_column(plain["min_p"]) if cuts_plain else None,
        top_p=_column(top_p["top_p"]) if len(top_p) else None,
        min_p=_column(top_p["min_p"]) if top_p["min_p"].any() else None,
    )


def _rank_cuts(rows: NDArray[np.void], vocab_size: int) -> RankCuts:
    max_k = min(-(-int(rows["top_k"].max()) // K_STEP) * K_STEP, padded_width(vocab_size))
    return RankCuts(
        temperature=_across(rows["temperature"], vocab_size),
        max_k=max_k,
        kth=_column(max_k - rows["top_k"]),
        top_p=_column(rows["top_p"]) if (rows["top_p"] < 1).any() else None,
        min_p=_column(rows["min_p"]) if rows["min_p"].any() else None,
    )


def _penalties(
    rows: NDArray[np.void],
    slots: NDArray[np.int64],
    prompts: Mapping[int, mx.array],
    vocab_size: int,
) -> Penalties | None:
    places = np.flatnonzero(rows["penalised"])
    if not len(places):
        return None
    penalised = rows[places]
    presence, frequency = penalised["presence"], penalised["frequency"]
    return Penalties(
        slots=slots[places],
        places=None if len(places) == len(rows) else _ints(places),
        repetition=_repetition(
            penalised, [prompts.get(slot) for slot in slots[places].tolist()], vocab_size
        ),
        presence=_column(presence) if presence.any() else None,
        frequency=_column(frequency) if frequency.any() else None,
    )


def _repetition(
    rows: NDArray[np.void], prompts: Sequence[mx.array | None], vocab_size: int
) -> Repetition | None:
    given = [mask for mask in prompts if mask is not None]
    if not given:
        return None
    empty = mx.zeros_like(given[0])
    return Repetition(
        strength=_across(rows["repetition"], vocab_size),
        prompts=mx.stack([empty if mask is None else mask for mask in prompts]),
    )


def _ints(places: NDArray[np.int64]) -> mx.array:
    return mx.array(places.astype(np.int32))


def _column(values: NDArray[np.generic]) -> mx.array:
    """(S,) -> (S, 1) on the device."""
    return mx.array(np.ascontiguousarray(values)[:, None])


def _across(values: NDArray[np.generic], vocab_size: int) -> mx.array:
    """(S,) -> (S, width) on the device, of S values in memory."""
    return mx.broadcast_to(_column(values), (len(values), padded_width(vocab_size)))


def sparse_bias(params: SamplingParams, stop_ids: frozenset[int]) -> SparseBias | None:
    """The additions that a request asks for; None: none."""
    banned = sorted(stop_ids) if params.min_tokens > 0 else []
    if not banned and not params.logit_bias:
        return None
    return SparseBias(
        ids=(*params.logit_bias, *banned),
        values=(*params.logit_bias.values(), *[-np.inf] * len(banned)),
        min_tokens=params.min_tokens,
    )
