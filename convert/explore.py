"""Size against divergence of one model, before it is converted (`--explore`).

One calibration pass predicts the divergence of any choice of formats (sizes.py). Two of the choices
are then run layer by layer, all matrices quantised, against the plain model on held-out text: that
is the check on the prediction. Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from ..errors import InvalidRequestError
from .calibration import logits
from .calibration.feedback import Feedbacks
from .calibration.measure import Measurements
from .calibration.stream import EMBEDDING, Moments, StreamedModel
from .calibration.texts import Texts
from .plan import ConversionPlan, PlannedTensor
from .quantise import QuantisationMethod, round_trip
from .run import Conversion
from .sidefiles import write_side_files
from .sizes import SizePoint, predicted_sizes

CHECKED = tuple(f"--target-bpw {bits:g}" for bits in (3.5, 4.5))


def explore(conversion: Conversion) -> list[SizePoint]:
    """Sizes and divergences of targets and of uniform formats, by size.

    Args:
        conversion: its options have a calibration text; its recipe decides what is not measured
            (routers, exceptions, dtype).

    Raises:
        InvalidRequestError: no text, or too little of it.
        ConversionError: the source has no tokenizer.
    """
    if conversion.options.calibration is None:
        raise InvalidRequestError("Exploring needs a text for calibration.", param="calibration")
    conversion.check_tokenizer()
    with TemporaryDirectory(prefix="mlxinfer-") as folder:
        write_side_files(Path(folder), conversion.source)
        texts = conversion.texts(Path(folder))
    found = conversion.calibrate(texts, probing=True, references=())
    plans = list(predicted_sizes(conversion.arranged, conversion.options.recipe, found))
    checked = [(plan, point) for plan, point in plans if point.label in CHECKED]
    measured = measured_divergences(conversion, texts, found, [plan for plan, _ in checked])
    known = {point.label: kl for (_, point), kl in zip(checked, measured, strict=True)}
    points = [replace(point, measured_kl=known.get(point.label)) for _, point in plans]
    return sorted(points, key=lambda point: (point.num_bytes, point.kl))


def measured_divergences(
    conversion: Conversion,
    texts: Texts,
    found: Measurements,
    plans: Sequence[ConversionPlan],
) -> list[float]:
    """KL(source || plan) in nats, mean over the short check texts, for each plan.

    Every matrix goes through its format and back, one layer of the model at a time; the texts are
    those that a conversion is checked on.
    """
    return _Check(conversion, texts, found, plans).run() if plans else []


class _Check:
    """Hidden states of the plain model, and of one quantised model for each plan."""

    def __init__(
        self,
        conversion: Conversion,
        texts: Texts,
        found: Measurements,
        plans: Sequence[ConversionPlan],
    ) -> None:
        self._arranged = conversion.arranged
        self._progress = conversion.progress
        self._searched = conversion.options.searched
        self._importance = found.importance
        self._streamed = StreamedModel(conversion.arranged, Moments())
        self._feedback = conversion.feedback(texts)
        self._length = len(texts.short[0])
        self._tensors = [{t.output.name: t for t in plan.tensors} for plan in plans]
        ids = [token for sequence in texts.short for token in sequence]
        self._plain = self._streamed.embed(ids)
        self._states = [self._embedded(ids, tensors) for tensors in self._tensors]

    def run(self) -> list[float]:
        """The mean divergence of each plan."""
        count = self._arranged.config.num_layers
        for index in range(count):
            self._layer(index)
            self._progress("check", index + 1, count)
        streamed, found = self._streamed, []
        reference = streamed.normed(self._plain)
        for states, tensors in zip(self._states, self._tensors, strict=True):
            method = self._method(tensors[streamed.head.name])
            if method is not None:
                (feedback,) = self._feedback(streamed.head) or (None,)
                method = replace(method, feedback=feedback)
            others = streamed.normed(states)[None]
            kl = logits.divergences(self._arranged, streamed, reference, others, method)
            found.append(float(kl[0]))
        return found

    def _embedded(self, ids: list[int], tensors: dict[str, PlannedTensor]) -> mx.array:
        table = self._streamed.output(EMBEDDING)
        method = self._method(tensors[table.name])
        rows = self._streamed.embedding_rows(sorted(set(ids)))
        if method is not None:  # a table that is the output projection too has feedback as such
            rows = _exact(rows, method, self._feedback(table))
        return self._streamed.embed(ids, rows)

    def _layer(self, index: int) -> None:
        plain = self._streamed.read_layer(index)
        self._plain = self._streamed.layer(index, plain)(self._plain, self._length)
        outputs = self._streamed.outputs_of(index)
        for number, tensors in enumerate(self._tensors):
            methods = {name: self._method(tensors[out.name]) for name, out in outputs.items()}
            changed = {
                name: _exact(plain[name], method, self._feedback(outputs[name]))
                for name, method in methods.items()
                if method is not None
            }
            layer = self._streamed.layer(index, {**plain, **changed})
            self._states[number] = layer(self._states[number], self._length)

    def _method(self, tensor: PlannedTensor) -> QuantisationMethod | None:
        """How a tensor is quantised; None: it is not, or its codes are the source's own."""
        if tensor.form is None or tensor.packed:
            return None
        importance = self._importance.get(tensor.output.path)
        return QuantisationMethod(tensor.form, tensor.dtype, self._searched, importance)


def _exact(matrix: mx.array, method: QuantisationMethod, feedbacks: Feedbacks = ()) -> mx.array:
    """A matrix quantised and back, in float32: bfloat16 would round what comes back."""
    wide = matrix.astype(mx.float32)
    if not feedbacks:
        return round_trip(wide, method)
    experts = wide.reshape(len(feedbacks), -1, wide.shape[-1])
    methods = (replace(method, feedback=feedback) for feedback in feedbacks)
    parts = [round_trip(*each) for each in zip(experts, methods, strict=True)]
    return mx.concatenate(parts).reshape(matrix.shape)
