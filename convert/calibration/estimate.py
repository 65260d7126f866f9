"""How long a calibrated conversion takes here, from products, roundings and reads of some rows.

The matrices that are multiplied and rounded have the sizes of the model's, and random values:
the model's own would cost more memory than the rest of the plan, a whole layer in float32.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource, OutputTensor
from ..arrays import mx_dtype
from ..plan import PROBE_LENGTH, ConversionPlan, MemoryBudget, shared_inputs
from ..quantise import ErrorFeedback, QuantisationMethod, make_feedback, quantise, rows_at_once
from ..recipes import ConversionOptions, affine, fitting
from .stream import StreamedModel
from .texts import CALIBRATION_LENGTH, SEQUENCES, checked_positions

BASE_S = 2.0  # of opening, and the report
TOKEN_S = 2e-5  # of a token of the vocabulary, for the tokenizer is written, read and tried
RUNS = 3
ENOUGH_S = 1.0  # after which a run is not repeated
LEAST_S = 0.1  # that products take together, to be measured well
MAX_PRODUCTS = 8  # that are timed together
TOKENS = 1024  # that go through a product that is timed
MAX_INPUTS = 1024  # of a product that is timed, and of moments
BESIDE = 1.2  # of the products of a layer: attention, norms and activations are a fifth more
TOKEN_CHARS = 2  # of a token, at least, over a long text


def estimated_seconds(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    budget: MemoryBudget,
    *,
    comparing: bool,
) -> float:
    """Seconds of running the source and of rounding; 0 without calibration."""
    if options.calibration is None:
        return 0.0
    streamed, config = StreamedModel(arranged), arranged.config
    matrices = [
        output
        for index in range(config.num_layers)
        for output in streamed.outputs_of(index).values()
        if len(output.shape) > 1
    ]
    rounded = [t.output for t in plan.tensors if t.form is not None and not t.packed]
    text = min(SEQUENCES * CALIBRATION_LENGTH, len(options.calibration) // TOKEN_CHARS)
    text *= bool(rounded)  # codes that are kept need none
    positions = checked_positions(config.vocab_size) * comparing
    tokens = text + 2 * positions  # the source, and the output
    if options.targeted:  # the probes of a layer go through those behind it, half of all
        units = sum(tensor.form is not None for tensor in plan.tensors)
        tokens += text // 4
        tokens += units * budget.probes * PROBE_LENGTH // 2
    weights = sum(output.num_weights * _active(arranged, output) for output in matrices)
    products = BESIDE * tokens * weights + 2 * positions * streamed.head.num_weights
    seconds = products * _product_s(arranged)
    seconds += _moments_s(arranged, [*matrices, streamed.head], budget.inputs, text)
    largest = max(matrices, key=lambda output: output.num_weights)
    count = sum(output.num_weights for output in rounded)
    seconds += count * _rounding_s(largest.shape, options, budget, arranged.source.dtype)
    reads = 2 + options.check_tensors + comparing  # the source, to run it; the output, to run it
    seconds += reads * plan.num_weights * _reading_s(arranged, largest, budget.block)
    seconds += config.vocab_size * TOKEN_S
    return BASE_S + seconds


def _active(arranged: ArrangedSource, output: OutputTensor) -> float:
    if len(output.shape) < 3:
        return 1.0
    return arranged.config.experts_per_token / output.shape[0]


def _product_s(arranged: ArrangedSource) -> float:
    """Seconds of a multiply-add in a product with a matrix, in the dtype that layers run in."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = mx.float32 if on_cpu else mx_dtype(arranged.source.dtype)
    width = min(arranged.config.hidden_size, MAX_INPUTS)
    inputs, matrix = mx.ones((TOKENS, width), dtype), mx.ones((width, width), dtype)
    mx.eval(inputs, matrix)

    def multiply(count: int) -> None:
        mx.eval([inputs @ matrix.T for _ in range(count)])

    count, spent = 1, 0.0
    while spent < LEAST_S and count < MAX_PRODUCTS:
        count *= 2
        spent = _timed(partial(multiply, count))
    return spent / (count * inputs.size * width)


def _moments_s(
    arranged: ArrangedSource, matrices: Iterable[OutputTensor], inputs: int, text: int
) -> float:
    """Seconds of the second moments of all inputs, `inputs` together, and of inverting those."""
    if not inputs:
        return 0.0
    size = min(inputs, arranged.config.hidden_size, MAX_INPUTS)
    rows = np.ones((TOKENS, size), np.float32)
    product = _timed(lambda: rows.T @ rows) / (rows.size * size)
    moments = np.eye(size, dtype=np.float32)
    inversion = _timed(lambda: make_feedback([moments], 1)) / size**3
    seconds = 0.0
    for output in shared_inputs(matrices):
        width, experts = output.shape[-1], output.shape[0] if len(output.shape) == 3 else 1
        together = min(inputs, width)
        seconds += product * text * experts * _active(arranged, output) * width * together
        seconds += inversion * experts * width * together**2
    return seconds


def _reading_s(arranged: ArrangedSource, output: OutputTensor, block: int) -> float:
    """Seconds of reading a number of a matrix, from its first `block` numbers."""

    def first() -> mx.array:
        values = next(arranged.blocks(output, block))
        mx.eval(values)
        return values

    return _timed(first) / first().size


def _rounding_s(
    shape: tuple[int, ...], options: ConversionOptions, budget: MemoryBudget, dtype: str
) -> float:
    """Seconds of rounding a number, from some rows of a matrix of this shape."""
    form, width = fitting(affine(4), shape), shape[-1]
    if form is None:
        return 0.0
    tile, feedback = rows_at_once(*shape[-2:]), None
    if options.feeds_back:
        size = min(budget.inputs, width)
        feedback = ErrorFeedback((np.eye(size, dtype=np.float32),) * (width // size))
    method = QuantisationMethod(form, dtype, options.searched, None, feedback, tile)
    rows = np.random.default_rng(0).standard_normal((tile, width), np.float32)
    return _timed(lambda: quantise(rows, method)) / rows.size / budget.workers


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
