"""The settings of each request as one row of a table, in the form that sampling needs them in."""

import numpy as np

from ..core import SamplingParams
from .randomness import stream_of

GREEDY, PLAIN, TOP_P, TOP_K = range(4)
KEEP_ALL = 2.0  # a top_p that no mass reaches, whatever the rounding
TINY = 1e-30  # stands for what is above 0 and would be 0 in float32

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
