"""Second moments X^T X of each matrix's inputs, a layer at a time, for error feedback.

While tensors are written in the order of their layers, the calibration text goes through the model
once more: each layer is run when the first of its matrices is to be quantised, and the moments of
that layer alone are held. Nothing is kept on the disk; a conversion that goes on runs the layers
before the first unfinished one again. Inputs are those of the full-precision model, so a matrix's
codes depend on no other matrix.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource, OutputTensor
from ..arrays import Floats
from ..feedback import ErrorFeedback, make_feedback
from .stream import StreamedModel

FEW_TOKENS = 64  # with fewer an expert's weights are rounded to the nearest

Feedbacks = tuple[ErrorFeedback | None, ...]  # one for each expert of a stack; else one


class InputMoments:
    """Sums of x x^T by path, in blocks of inputs, while `watching`.

    Matrices that share their inputs share the sums. Experts have their own.
    """

    def __init__(self, block: int) -> None:
        self.watching = False
        self._block = block
        self._keys: dict[str, tuple[str, ...]] = {}  # path -> paths of the same inputs
        self._sums: dict[tuple[tuple[str, ...], int], list[Floats]] = {}  # by expert
        self._counts: dict[tuple[tuple[str, ...], int], int] = {}
        self._made: dict[tuple[tuple[str, ...], int], ErrorFeedback | None] = {}

    def see(self, paths: Sequence[str], x: mx.array, experts: mx.array | None = None) -> None:
        """Add inputs x (..., in_dims) of these matrices; `experts`: as of ObservedExperts."""
        if not self.watching:
            return
        key = tuple(paths)
        self._keys |= dict.fromkeys(paths, key)
        if experts is None:
            self._add((key, 0), _rows(x))
            return
        chosen = np.array(experts).reshape(-1)
        rows = _rows(mx.broadcast_to(x[..., 0, :], (*experts.shape, x.shape[-1])))
        for expert in np.unique(chosen).tolist():
            self._add((key, expert), rows[chosen == expert])

    def _add(self, place: tuple[tuple[str, ...], int], rows: Floats) -> None:
        starts = range(0, rows.shape[1], self._block)
        found = [part.T @ part for part in (rows[:, s : s + self._block] for s in starts)]
        known = self._sums.setdefault(place, [np.zeros_like(block) for block in found])
        for total, block in zip(known, found, strict=True):
            total += block
        self._counts[place] = self._counts.get(place, 0) + len(rows)

    def feedback(self, path: str, expert: int) -> ErrorFeedback | None:
        """Feedback for a matrix; None: too few tokens reached it, or none."""
        place = self._keys.get(path, ()), expert
        if self._counts.get(place, 0) < FEW_TOKENS:
            return None
        if place not in self._made:
            self._made[place] = make_feedback(self._sums.pop(place), self._counts[place])
        return self._made[place]


def _rows(x: mx.array) -> Floats:
    return np.array(x.reshape(-1, x.shape[-1]).astype(mx.float32))


class FeedbackPass:
    """The calibration text on its way through the layers.

    Args:
        arranged: the source.
        sequences: of token ids, of one length.
        block: inputs of which the moments are held together; a multiple of every group size.
    """

    def __init__(
        self, arranged: ArrangedSource, sequences: Sequence[Sequence[int]], block: int
    ) -> None:
        self._arranged, self._sequences, self._block = arranged, sequences, block
        self._num_layers = arranged.config.num_layers
        self._begin()

    def of(self, output: OutputTensor) -> Feedbacks:
        """Feedback for a matrix, or for each expert of a stack; (): nothing is known of its inputs.

        Quickest in the order of the layers, the output projection last.
        """
        is_head = output.name == self._streamed.head.name
        index = self._num_layers if is_head else output.layer
        if index is None or output.ahead:
            return ()
        if self._observed != index:
            self._observe(index)
        path = self._streamed.name_of(output).removesuffix(".weight")
        count = output.shape[0] if len(output.shape) == 3 else 1
        found = tuple(self._moments.feedback(path, expert) for expert in range(count))
        return found if any(found) else ()

    def _begin(self) -> None:
        self._next, self._observed = 0, -1
        self._moments = InputMoments(self._block)
        self._streamed = StreamedModel(self._arranged, self._moments)
        self._states = self._streamed.embed([t for ids in self._sequences for t in ids])

    def _observe(self, index: int) -> None:
        """Run the layers up to this one, and keep the moments of this one alone."""
        if index < self._next:
            self._begin()
        while self._next < index:
            self._advance(watching=False)
        self._advance(watching=True)
        self._observed = index

    def _advance(self, *, watching: bool) -> None:
        streamed, index = self._streamed, self._next
        streamed.observer = self._moments = InputMoments(self._block)
        self._moments.watching = watching
        if index < self._num_layers:
            layer = streamed.layer(index, streamed.read_layer(index))
            self._states = layer(self._states, len(self._sequences[0]))
        else:
            path = streamed.name_of(streamed.head).removesuffix(".weight")
            self._moments.see([path], streamed.normed(self._states))
        self._moments.watching = False
        self._next += 1
