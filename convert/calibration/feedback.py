"""Statistics of what flows into each matrix, taken layer by layer while the layers are written.

One pass of the texts through the source model gives everything: sums of the inputs' squares, sums
of x x^T, and logits. The squares weigh the squared errors when scales are chosen (llama.cpp calls
them the importance matrix). Error feedback is made from the sums of x x^T. The output's logits are
compared with the logits. Of one layer at a time the sums are held, in blocks of inputs where memory
is short.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource, OutputTensor
from ..arrays import Floats
from ..plan import PlannedTensor
from ..quantise import ErrorFeedback, dequantised, make_feedback
from ..verify import Progress
from . import logits
from .stream import EMBEDDING, Change, StreamedModel
from .texts import Texts

FEW_TOKENS = 64  # with fewer an expert's weights are rounded to the nearest
LEAST = 1e-4  # of the mean: a channel that the text never used still has some weight

Feedbacks = tuple[ErrorFeedback | None, ...]  # one for each expert of a stack; else one


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of the inputs of one matrix, or of a stack of them."""

    importance: Floats | None = None  # (in_dims,), mean 1: weights of squared errors
    feedbacks: Feedbacks = ()  # (): weights are rounded to the nearest

    @property
    def nearest(self) -> int:
        return self.feedbacks.count(None)


def normalised(squares: Floats) -> Floats:
    """Sums of squares (in_dims,) as weights of mean 1."""
    mean = squares.mean()
    if not mean > 0:
        return np.ones_like(squares)
    scaled: Floats = np.maximum(squares / mean, np.float32(LEAST)).astype(np.float32)
    return scaled / scaled.mean()


@dataclass(slots=True)
class InputSums:
    """Sums over the inputs of matrices that share them."""

    squares: Floats
    products: dict[int, list[Floats]] = field(default_factory=dict)  # by expert: x x^T of blocks
    counts: Counter[int] = field(default_factory=Counter)  # tokens, by expert
    feedbacks: dict[int, ErrorFeedback | None] = field(default_factory=dict)  # that were made


class Moments:
    """Sums over the inputs of matrices, by path; matrices that share their inputs share the sums.

    Args:
        block: inputs whose x x^T is held together, a multiple of every group size; 0: only squares
            are summed.
    """

    def __init__(self, block: int = 0) -> None:
        self._block = block
        self._sums: dict[str, InputSums] = {}

    def see(self, paths: Sequence[str], x: mx.array, experts: mx.array | None = None) -> None:
        """Add inputs x (..., in_dims) of matrices at `paths`; `experts` as in ObservedExperts."""
        wide = x.astype(mx.float32)
        flat = np.array(wide.reshape(-1, x.shape[-1]))
        sums = self._sums.get(paths[0]) or InputSums(np.zeros(x.shape[-1], np.float32))
        self._sums |= dict.fromkeys(paths, sums)
        sums.squares += np.einsum("tk,tk->k", flat, flat)
        if not self._block:
            return
        if experts is None:
            self._add(sums, 0, flat)
            return
        chosen = np.array(experts).reshape(-1)
        inputs = mx.broadcast_to(wide[..., 0, :], (*experts.shape, x.shape[-1]))
        rows = np.array(inputs.reshape(-1, x.shape[-1]))
        for expert in np.unique(chosen).tolist():
            self._add(sums, expert, rows[chosen == expert])

    def _add(self, sums: InputSums, expert: int, rows: Floats) -> None:
        starts = range(0, rows.shape[1], self._block)
        blocks = [part.T @ part for part in (rows[:, s : s + self._block] for s in starts)]
        known = sums.products.setdefault(expert, [np.zeros_like(block) for block in blocks])
        for total, block in zip(known, blocks, strict=True):
            total += block
        sums.counts[expert] += len(rows)

    def importance(self, path: str) -> Floats | None:
        """Weights of the squared errors of a matrix; None: nothing is known of its inputs."""
        sums = self._sums.get(path)
        return None if sums is None else normalised(sums.squares)

    def statistics(self, path: str, num_experts: int) -> Statistics:
        feedbacks = tuple(self._feedback(path, expert) for expert in range(num_experts))
        return Statistics(self.importance(path), feedbacks if any(feedbacks) else ())

    def _feedback(self, path: str, expert: int) -> ErrorFeedback | None:
        """Feedback for a matrix; None: too few tokens reached it, or none."""
        sums = self._sums.get(path)
        if sums is None or sums.counts[expert] < FEW_TOKENS:
            return None
        if expert not in sums.feedbacks:
            products = sums.products.pop(expert)
            sums.feedbacks[expert] = make_feedback(products, sums.counts[expert])
        return sums.feedbacks[expert]


class CalibrationPass:
    """The texts on their way through the layers of the source.

    Args:
        block: see Moments.
        calibrating: whether statistics are asked for.
        references: files for the logits of the short and of the long texts; (): none are compared.
        rounded: the tensors, by name, whose weights are rounded to the nearest code.
        progress: is told how much of the texts has gone through how many layers, then how many
            columns of the logits are written.
        model: what `progress` calls the model.
    """

    def __init__(
        self,
        arranged: ArrangedSource,
        texts: Texts,
        block: int,
        *,
        calibrating: bool,
        references: Sequence[Path],
        rounded: Mapping[str, PlannedTensor] | None = None,
        progress: Progress = lambda *_: None,
        model: str = "source",
    ) -> None:
        self._arranged, self._block = arranged, block
        self._num_layers = arranged.config.num_layers
        self._calibrating, self._references = calibrating, references
        self._rounded, self._progress, self._model = rounded or {}, progress, model
        self._next, self._observed = 0, -1  # layers; behind the last one is the output projection
        self._moments = Moments(block)
        self._streamed = StreamedModel(arranged)
        start = partial(self._streamed.states, change=self._round(self._streamed.output(EMBEDDING)))
        self._calibrated = [start(texts.calibration)] if calibrating else []
        self._compared = [start(text) for text in (texts.short, texts.long) if references]
        self._parts = sum(len(one.parts) for one in (*self._calibrated, *self._compared))
        self._done = 0
        self._tell(0)

    def of(self, output: OutputTensor) -> Statistics:
        """The statistics of a matrix, or of each expert of a stack.

        To be asked for in the order of the layers, the output projection last.
        """
        is_head = output.name == self._streamed.head.name
        index = self._num_layers if is_head else output.layer
        if index is None or output.ahead or not self._calibrating:
            return Statistics()
        if self._observed != index:
            assert self._next <= index, "a layer's statistics are not kept"
            while self._next < index:
                self._advance(watching=False)
            self._advance(watching=True)
            self._observed = index
        path = self._streamed.name_of(output).removesuffix(".weight")
        return self._moments.statistics(path, output.shape[0] if len(output.shape) == 3 else 1)

    def write_references(self) -> None:
        """Write the logits of the texts that the output is compared on, unless they are there."""
        if all(path.exists() for path in self._references):
            return
        self._calibrated = []
        while self._next < self._num_layers:
            self._advance(watching=False)
        norm, streamed = self._streamed.final_norm(), self._streamed
        states = (norm(mx.concatenate(states.parts)) for states in self._compared)
        hidden = dict(zip(self._references, states, strict=True))
        vocab = self._arranged.config.vocab_size
        tell = partial(self._progress, f"logits of {self._model}")
        tell(0, vocab)
        change = self._round(streamed.head)
        logits.write(hidden, self._arranged, streamed, change, lambda done: tell(done, vocab))

    def _round(self, output: OutputTensor) -> Change:
        """A function that rounds an output's values, where they are to be rounded, as MLX does."""
        planned = self._rounded.get(output.name)
        if planned is None or planned.form is None or planned.packed:
            return lambda values: values
        form = planned.form

        def rounded(values: mx.array) -> mx.array:
            parts = mx.quantize(values, form.group_size, form.bits, form.mode)
            scales, biases = parts[1], parts[2] if len(parts) > 2 else None
            return dequantised(parts[0], scales, biases, form).astype(values.dtype)

        return rounded

    def _tell(self, parts: int) -> None:
        self._done += parts
        step = "calibrate" if self._calibrating else f"run {self._model}"
        self._progress(step, self._done, self._parts * self._num_layers)

    def _advance(self, *, watching: bool) -> None:
        streamed, index = self._streamed, self._next
        self._moments = Moments(self._block)
        if index < self._num_layers:
            outputs, tensors = streamed.outputs_of(index), streamed.read_layer(index)
            tensors = {name: self._round(outputs[name])(array) for name, array in tensors.items()}
            layer = streamed.layer(index, tensors)
            streamed.see = self._moments.see if watching else None
            for states in self._calibrated:
                states.advance(layer, self._tell)
            streamed.see = None
            for states in self._compared:
                states.advance(layer, self._tell)
        elif watching:
            path = streamed.name_of(streamed.head).removesuffix(".weight")
            norm = streamed.final_norm()
            for states in self._calibrated:
                for part in states.parts:
                    self._moments.see([path], norm(part))
        self._next += 1
