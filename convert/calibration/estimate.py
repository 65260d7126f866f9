"""How long a calibrated conversion takes here, from one layer that is run and some of its rows."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource
from ..arrays import Floats, as_numpy
from ..plan import PROBE_LENGTH, ConversionPlan, MemoryBudget
from ..quantise import ErrorFeedback, QuantisationMethod, make_feedback, quantise, rows_at_once
from ..recipes import ConversionOptions, affine, fitting
from .stream import StreamedModel
from .texts import CALIBRATION_LENGTH, SEQUENCES, checked_positions

BASE_S = 2.0  # of opening, the tokenizer, and the report
RUNS = 3
LEAST_S = 0.2  # that a layer's run takes, to be measured well
MAX_TOKENS = 1024  # in the run of the first layer that the estimate times
MAX_PRODUCTS = 1024  # inputs in the product that the estimate times
ENOUGH_S = 1.0  # after which a run is not repeated
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
    text = min(SEQUENCES * CALIBRATION_LENGTH, len(options.calibration) // TOKEN_CHARS)
    positions = checked_positions(config.vocab_size) * comparing
    # The source, its rounded weights and the output; logits take as long by weight as layers do.
    tokens = text + 3 * positions
    if options.targeted:  # the probes of a layer go through those behind it, half of all
        units = sum(tensor.form is not None for tensor in plan.tensors)
        tokens += text // 4
        tokens += units * budget.probes * PROBE_LENGTH // 2
    run = _run_layer(arranged, budget.inputs)
    seconds = layers * (tokens * run.by_token + text * run.moments_by_token)
    head = config.vocab_size * config.hidden_size
    seconds += 3 * positions * head * run.by_token / run.num_weights
    seconds += _round(arranged, plan, options, budget, run)
    return BASE_S + seconds + 60 * (options.learn_minutes or 0)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Times of a run of the first layer, and a part of it. The layer itself is dropped."""

    by_token: float  # seconds
    moments_by_token: float  # seconds of the second moments of its inputs
    num_weights: int
    shape: tuple[int, ...]  # of the largest matrix
    rows: Floats  # (N, in_dims) its first rows
    widths: frozenset[int]  # inputs of its matrices


def _run_layer(arranged: ArrangedSource, inputs: int) -> LayerTime:
    """Run the first layer on more and more tokens, until it takes long enough to be measured.

    `inputs` have moments together. Those are not held here: their products are only counted.
    """
    streamed = StreamedModel(arranged)
    tensors = streamed.read_layer(0)
    matrices = [array for array in tensors.values() if array.ndim > 1]
    largest = max(matrices, key=lambda array: array.size)
    shape, widths = largest.shape, frozenset(array.shape[-1] for array in matrices)
    first_rows = largest.reshape(-1, shape[-1])[: rows_at_once(*shape[-2:])]
    rows = np.array(as_numpy(first_rows.astype(mx.float32)))
    num_weights = sum(array.size for array in tensors.values())
    layer = streamed.layer(0, tensors)
    del tensors, matrices, largest, first_rows  # the layer has joined copies of them
    products = 0

    def count_products(_: object, x: mx.array, experts: mx.array | None) -> None:
        nonlocal products
        width = x.shape[-1]
        num_rows = x.size // width if experts is None else experts.size
        products += num_rows * width * min(inputs, width)

    length = min(CALIBRATION_LENGTH, arranged.config.max_context - 1)
    ids = [token % arranged.config.vocab_size for token in range(length)]
    streamed.see = count_products
    streamed.states([ids]).advance(layer)  # what is compiled is compiled here
    streamed.see = None
    count, spent = 1, 0.0
    while spent < LEAST_S and count * length <= MAX_TOKENS:
        states = streamed.states([ids] * count)
        spent = _timed(partial(states.advance, layer))
        count *= 2
    by_token = 2 * spent / (count * length)
    moments = products / length * _product_s(rows)
    return LayerTime(by_token, moments, num_weights, shape, rows, widths)


def _product_s(rows: Floats) -> float:
    """Seconds of a product of two numbers, in that of a matrix (N, in_dims) with itself."""
    part = rows[:, :MAX_PRODUCTS]
    return _timed(lambda: part.T @ part) / (part.size * part.shape[1])


def _round(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    budget: MemoryBudget,
    run: LayerTime,
) -> float:
    """Seconds of rounding all matrices, and of inverting the moments of their inputs."""
    form, rows = fitting(affine(4), run.shape), run.rows
    if form is None:
        return 0.0
    tile, feedback, inverting = rows_at_once(*run.shape[-2:]), None, 0.0
    if options.feeds_back:
        size = min(budget.inputs, rows.shape[1])
        made: list[ErrorFeedback | None] = []
        moments: list[Floats] = [np.eye(size, dtype=np.float32)] * (rows.shape[1] // size)
        inverting = _timed(lambda: made.append(make_feedback(moments, size)))
        feedback = made[0]
        inverting *= sum((min(budget.inputs, width) / size) ** 3 for width in run.widths)
    method = QuantisationMethod(form, arranged.source.dtype, options.searched, None, feedback, tile)
    spent = _timed(lambda: quantise(rows, method))
    count = sum(tensor.output.num_weights for tensor in plan.tensors if tensor.form is not None)
    return spent * count / rows.size / budget.workers + inverting * arranged.config.num_layers


def _timed(work: Callable[[], object]) -> float:
    """The shortest of a few runs: what else the machine does only makes one longer.

    On a CPU its own time counts, so that a busy machine does not seem slow; a GPU's is not known.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    clock = time.process_time if on_cpu else time.perf_counter
    spent = []
    for _ in range(RUNS):
        started = clock()
        work()
        spent.append(clock() - started)
        if sum(spent) > ENOUGH_S:
            break
    return min(spent)
