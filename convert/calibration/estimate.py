"""How long a calibrated conversion takes here, from one layer that is run and some of its rows."""

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource
from ..arrays import Floats, as_numpy
from ..plan import PROBE_LENGTH, ConversionPlan, MemoryBudget
from ..quantise import ErrorFeedback, QuantisationMethod, make_feedback, quantise
from ..recipes import ConversionOptions, affine, fitting
from .stream import StreamedModel
from .texts import CALIBRATION_LENGTH, MAX_CHECKED

RUNS = 3
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
    layers = arranged.config.num_layers
    text = min(budget.sequences * CALIBRATION_LENGTH, len(options.calibration) // TOKEN_CHARS)
    tokens = text + 2 * MAX_CHECKED * comparing
    if options.targeted:  # the probes of a layer go through those behind it, half of all
        units = sum(tensor.form is not None for tensor in plan.tensors)
        tokens += text // 4
        tokens += units * budget.probes * PROBE_LENGTH // 2
    by_token, matrix = _run_layer(arranged)
    seconds = tokens * layers * by_token
    seconds += _round(arranged, plan, options, budget, matrix)
    return seconds + 60 * (options.learn_minutes or 0)


def _run_layer(arranged: ArrangedSource) -> tuple[float, mx.array]:
    """Seconds of the first layer for each token, and the layer's largest matrix."""
    streamed = StreamedModel(arranged)
    tensors = streamed.read_layer(0)
    layer = streamed.layer(0, tensors)
    ids = [token % arranged.config.vocab_size for token in range(CALIBRATION_LENGTH)]
    states = streamed.states([ids])
    states.advance(layer)  # what is compiled is compiled here
    spent = _timed(lambda: states.advance(layer))
    matrix = max((a for a in tensors.values() if a.ndim > 1), key=lambda a: a.size)
    return spent / CALIBRATION_LENGTH, matrix


def _round(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    budget: MemoryBudget,
    matrix: mx.array,
) -> float:
    """Seconds of rounding all matrices, and of inverting the moments of their inputs."""
    some = matrix.reshape(-1, matrix.shape[-1])[: ErrorFeedback.ROWS]
    rows = np.asarray(as_numpy(some.astype(mx.float32)))
    form = fitting(affine(4), matrix.shape)
    if form is None:
        return 0.0
    feedback, inverting = None, 0.0
    if options.feeds_back:
        size = min(budget.inputs, rows.shape[1])
        made: list[ErrorFeedback | None] = []
        moments: list[Floats] = [np.eye(size, dtype=np.float32)] * (rows.shape[1] // size)
        inverting = _timed(lambda: made.append(make_feedback(moments, size)))
        feedback = made[0]
    method = QuantisationMethod(form, arranged.source.dtype, options.searched, None, feedback)
    wide = rows.astype(np.float32)[:, : rows.shape[1] // form.group_size * form.group_size]
    spent = _timed(lambda: quantise(wide, method))
    count = sum(tensor.output.num_weights for tensor in plan.tensors if tensor.form is not None)
    return spent * count / rows.size / budget.workers + 4 * inverting * arranged.config.num_layers


def _timed(work: Callable[[], object]) -> float:
    """The shortest of a few runs: what else the machine does only makes one longer."""
    spent = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
    return min(spent)
