"""How long a calibrated conversion takes here, from one layer that is run and some of its rows."""

import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource
from ..arrays import Floats, as_numpy
from ..plan import INPUTS, PROBE_LENGTH, ConversionPlan, MemoryBudget
from ..quantise import ErrorFeedback, QuantisationMethod, make_feedback, quantise
from ..recipes import ConversionOptions, affine, fitting
from .feedback import Moments
from .stream import MAX_ROWS, StreamedModel
from .texts import CALIBRATION_LENGTH, checked_positions

RUNS = 3
LEAST_S = 0.2  # that a layer's run takes, to be measured well
TOKEN_CHARS = 2  # of a token, at least, over a long text


def estimated_seconds(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    budget: MemoryBudget,
    *,
    comparing: bool,
) -> float:
    """Seconds of running the source, of rounding, and of learning; 0 without calibration.

    Args:
        comparing: the source and the output are run to compare their logits.
    """
    if options.calibration is None:
        return 0.0
    layers, config = arranged.config.num_layers, arranged.config
    text = min(budget.sequences * CALIBRATION_LENGTH, len(options.calibration) // TOKEN_CHARS)
    positions = checked_positions(config.vocab_size) * comparing
    # The source, its rounded weights and the output; logits take as long by weight as layers do.
    tokens = text + 3 * positions
    if options.targeted:  # the probes of a layer go through those behind it, half of all
        units = sum(tensor.form is not None for tensor in plan.tensors)
        tokens += text // 4
        tokens += units * budget.probes * PROBE_LENGTH // 2
    by_token, tensors = _run_layer(arranged)
    weights = sum(array.size for array in tensors.values())
    seconds = tokens * layers * by_token
    seconds += 3 * positions * config.vocab_size * config.hidden_size * by_token / weights
    seconds += _round(arranged, plan, options, budget, tensors)
    return seconds + 60 * (options.learn_minutes or 0)


def _run_layer(arranged: ArrangedSource) -> tuple[float, dict[str, mx.array]]:
    """Seconds of the first layer for each token, moments included, and its tensors."""
    streamed = StreamedModel(arranged)
    tensors = streamed.read_layer(0)
    layer = streamed.layer(0, tensors)
    streamed.see = Moments(INPUTS[0]).see
    length = min(CALIBRATION_LENGTH, arranged.config.max_context - 1)
    count, spent = 1, 0.0
    while spent < LEAST_S and count * length <= MAX_ROWS:
        ids = [[token % arranged.config.vocab_size for token in range(length)]] * count
        states = streamed.states(ids)
        states.advance(layer)  # what is compiled is compiled here
        spent = _timed(partial(states.advance, layer))
        count *= 2
    return 2 * spent / (count * length), tensors


def _round(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    budget: MemoryBudget,
    tensors: dict[str, mx.array],
) -> float:
    """Seconds of rounding all matrices, and of inverting the moments of their inputs."""
    matrices = [array for array in tensors.values() if array.ndim > 1]
    matrix = max(matrices, key=lambda array: array.size)
    form = fitting(affine(4), matrix.shape)
    if form is None:
        return 0.0
    some = matrix.reshape(-1, matrix.shape[-1])[: ErrorFeedback.ROWS]
    rows = np.asarray(as_numpy(some.astype(mx.float32)))
    feedback, inverting = None, 0.0
    if options.feeds_back:
        size = min(budget.inputs, rows.shape[1])
        made: list[ErrorFeedback | None] = []
        moments: list[Floats] = [np.eye(size, dtype=np.float32)] * (rows.shape[1] // size)
        inverting = _timed(lambda: made.append(make_feedback(moments, size)))
        feedback = made[0]
        widths = [min(budget.inputs, array.shape[-1]) for array in matrices]
        inverting *= sum((width / size) ** 3 for width in set(widths))
    method = QuantisationMethod(form, arranged.source.dtype, options.searched, None, feedback)
    spent = _timed(lambda: quantise(rows, method))
    count = sum(tensor.output.num_weights for tensor in plan.tensors if tensor.form is not None)
    return spent * count / rows.size / budget.workers + inverting * arranged.config.num_layers


def _timed(work: Callable[[], object]) -> float:
    """The shortest of a few runs: what else the machine does only makes one longer."""
    spent = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
    return min(spent)
