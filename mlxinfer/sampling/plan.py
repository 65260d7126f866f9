"""What a batch needs done, worked out once and kept while its rows stay the same.

Rows fall into groups by the work they need, so that nobody pays for what another row asked: greedy,
drawn from all tokens, drawn after top-p alone (a sort of the row), drawn after top-k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from ..metal_kernels.sample import SETTINGS
from .biases import Biases, SparseBias
from .blocks import padded_width
from .logprobs import LogprobRows, logprob_rows
from .penalties import Penalties
from .randomness import stream_of
from .truncation import Cuts

GREEDY, PLAIN, TOP_P, TOP_K = range(4)
KEEP_ALL = 2.0  # a top_p that no mass reaches, whatever the rounding
TINY = 1e-30  # stands for what is above 0 and would be 0 in float32
K_STEP = 64  # top_k is rounded up to this: whole vectors, and few shapes

ROW = np.dtype(
    [
        ("kind", np.int8),
        ("stream", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("penalised", np.bool_),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("logprobs", np.int32),  # -1: none asked for
    ]
)


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
    return (
        kind,
        stream_of(params.seed),
        max(params.temperature, TINY),
        top_k,
        top_p if top_p < 1 else KEEP_ALL,
        params.min_p,
        params.penalised,
        min(max(params.repetition_penalty, TINY), 1 / TINY),
        params.presence_penalty,
        params.frequency_penalty,
        -1 if params.logprobs is None else params.logprobs,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """S rows that are drawn after the same kind of cut."""

    rows: mx.array | slice  # (S,) in the batch; a slice: the whole batch
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Plan:
    """All that does not change from step to step while the batch stays the same."""

    slots: tuple[int, ...]
    greedy: mx.array | slice | None  # rows whose most probable token is taken; None: no row
    drawn: tuple[Group, ...]
    drawn_places: NDArray[np.int64]  # (D,) rows of all groups, one after the other
    streams: NDArray[np.uint64]  # (D,) of these
    order: mx.array | None  # (R,) where each row is once greedy and drawn stand one after another
    penalties: Penalties | None
    biases: Biases | None
    logprobs: LogprobRows | None
    settings: NDArray[np.void]  # (R,) SETTINGS for the Metal kernel, counts left out
    width: int  # of padded rows

    @property
    def adjusts(self) -> bool:
        """Whether any row has penalties or biases."""
        return self.penalties is not None or self.biases is not None

    @property
    def all_greedy(self) -> bool:
        """Whether the token of every row is the most probable one."""
        return not self.drawn


def make_plan(
    slots: tuple[int, ...],
    table: NDArray[np.void],
    biases: Mapping[int, SparseBias],
    prompts: Mapping[int, mx.array],
    vocab_size: int,
) -> Plan:
    """Sort out a batch.

    Args:
        slots: (R,) of its rows.
        table: ROWs by slot.
        biases: by slot, of those that have any.
        prompts: prompt_mask by slot, of those that have a repetition penalty.
        vocab_size: V
    """
    rows = table[list(slots)]
    places = [np.flatnonzero(rows["kind"] == kind) for kind in (GREEDY, PLAIN, TOP_P, TOP_K)]
    drawn_places = np.concatenate(places[1:])
    order = np.argsort(np.concatenate(places))
    asked = np.flatnonzero(rows["logprobs"] >= 0).tolist()
    biased = [place for place, slot in enumerate(slots) if slot in biases]
    return Plan(
        slots=slots,
        greedy=_index(places[0], len(rows)) if len(places[0]) else None,
        drawn=tuple(
            Group(_index(some, len(rows)), _cuts(rows[some], vocab_size))
            for some in places[1:]
            if len(some)
        ),
        drawn_places=drawn_places,
        streams=rows["stream"][drawn_places],
        order=None if max(map(len, places)) == len(rows) else mx.array(order.astype(np.int32)),
        penalties=_penalties(rows, np.array(slots), prompts),
        biases=Biases(biased, [biases[slots[place]] for place in biased], vocab_size)
        if biased
        else None,
        logprobs=logprob_rows(asked, rows["logprobs"][asked].tolist()) if asked else None,
        settings=_settings(rows),
        width=padded_width(vocab_size),
    )


def _settings(rows: NDArray[np.void]) -> NDArray[np.void]:
    settings = np.zeros(len(rows), SETTINGS)
    for name in ("top_k", "top_p", "min_p", "stream"):
        settings[name] = rows[name]
    settings["temperature"] = np.where(rows["kind"] == GREEDY, 0, rows["temperature"])
    return settings


def _index(places: NDArray[np.int64], num_rows: int) -> mx.array | slice:
    return slice(None) if len(places) == num_rows else mx.array(places.astype(np.int32))


def _cuts(rows: NDArray[np.void], vocab_size: int) -> Cuts:
    max_k = -(-int(rows["top_k"].max()) // K_STEP) * K_STEP
    return Cuts(
        temperature=_column(rows["temperature"]),
        min_p=_column(rows["min_p"]) if rows["min_p"].any() else None,
        top_p=_column(rows["top_p"]) if (rows["top_p"] < 1).any() else None,
        top_k=_column(rows["top_k"]) if max_k else None,
        max_k=min(max_k, padded_width(vocab_size)),
    )


def _penalties(
    rows: NDArray[np.void], slots: NDArray[np.int64], prompts: Mapping[int, mx.array]
) -> Penalties | None:
    places = np.flatnonzero(rows["penalised"])
    if not len(places):
        return None
    penalised = rows[places]
    return Penalties(
        slots=slots[places],
        places=None if len(places) == len(rows) else mx.array(places.astype(np.int32)),
        repetition=_column(penalised["repetition"]),
        presence=_column(penalised["presence"]),
        frequency=_column(penalised["frequency"]),
        prompts=_stack([prompts.get(slot) for slot in slots[places].tolist()]),
    )


def _stack(masks: Sequence[mx.array | None]) -> mx.array | None:
    """(P, width) masks one above the other, None as an empty one; None if there is no other."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    empty = mx.zeros_like(given[0])
    return mx.stack([empty if mask is None else mask for mask in masks])


def _column(values: Sequence[float] | NDArray[np.generic]) -> mx.array:
    """(S,) -> (S, 1) on the device."""
    return mx.array(np.ascontiguousarray(values)[:, None])
