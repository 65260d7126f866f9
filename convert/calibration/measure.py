"""The cost of each unit in each format: measured where a target size is to be met.

Each unit (one matrix, or gate with up) is quantised alone in a probe format. The hidden states of a
few short sequences with that change are carried to the end beside the plain ones. So a unit's
damage is measured at the logits, with one layer of the model in memory.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource, OutputTensor
from ..arrays import Floats, as_numpy
from ..plan import MAX_WORKERS, PROBE_LENGTH
from ..quantise import QuantisationMethod, quantise, round_trip
from ..read import MLXFormat
from ..recipes import Recipe, fitting
from . import logits
from .allocation import MeasuredUnit, candidates_of, units_of
from .feedback import Moments
from .stream import EMBEDDING, HiddenStates, StreamedModel

SAMPLE = 1 << 18  # numbers of a tensor: their error stands for all
SHARE = 4  # every fourth sequence for calibration is measured on

Advance = Callable[[int, int], None]  # layers done, of how many


def measure_units(
    arranged: ArrangedSource,
    sequences: Sequence[list[int]],
    recipe: Recipe,
    num_probes: int,
    advance: Advance,
) -> list[MeasuredUnit]:
    """The cost of each unit.

    Args:
        recipe: what is not measured: routers, exceptions, dtype.
        num_probes: sequences that are carried to the end for each unit.
        advance: called after each layer.
    """
    with ThreadPoolExecutor(MAX_WORKERS) as pool:
        state = _ProbePass(arranged, sequences[::SHARE], recipe, num_probes, pool)
        count = arranged.config.num_layers
        advance(0, count)
        for index in range(count):
            state.layer(index)
            advance(index + 1, count)
        return state.finish()


class _ProbePass:
    """Hidden states after the layers so far: of the plain texts, and of each unit's probe."""

    def __init__(
        self,
        arranged: ArrangedSource,
        sequences: Sequence[list[int]],
        recipe: Recipe,
        num_probes: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._arranged, self._recipe, self._pool = arranged, recipe, pool
        self._streamed = StreamedModel(arranged)
        self._length = len(sequences[0])
        probes = [ids[:PROBE_LENGTH] for ids in sequences[:num_probes]]
        self._probed = mx.array(np.array(probes, np.int32))  # (P, length) ids
        self._states = self._streamed.states(sequences)
        self._probes: list[mx.array] = []  # one (P, hidden) for each of `_measured`
        self._measured: list[MeasuredUnit] = []
        self._importance: dict[str, Floats] = {}
        self._units = units_of(arranged, recipe)
        self._probe_ends()

    def finish(self) -> list[MeasuredUnit]:
        streamed, head = self._streamed, self._streamed.head
        moments, norm = Moments(), streamed.final_norm()
        for part in self._states.parts:
            moments.see([head.path], norm(part), None)
        self._keep_importance(head, moments.importance(head.path))
        for unit in self._measured:
            if unit.layer is None:
                self._errors_of_end(unit, unit.outputs[0])
        base = self._probe_base()
        kls = logits.divergences(self._arranged, streamed, base, self._probes)
        for index, unit in enumerate(self._measured):
            unit.kl = kls[index]
            if head in unit.outputs:
                method = self._method(head, unit.probe)
                one = [self._probes[index]]
                (unit.kl,) = logits.divergences(self._arranged, streamed, base, one, method)
        return self._measured

    def _probe_base(self) -> mx.array:
        """The first tokens of the first sequences, (P, hidden)."""
        count, length = self._probed.shape
        rows = mx.concatenate(self._states.parts[:count])  # a part has one or more
        picked = rows.reshape(-1, self._length, rows.shape[-1])[:count, :length]
        return picked.reshape(-1, picked.shape[-1])

    def _probe_ends(self) -> None:
        """Probes of the embedding, and of the output projection, which begins as the text does."""
        for unit in self._units:
            if unit.layer is not None:
                continue
            self._measured.append(unit)
            if unit.outputs[0].name != self._streamed.output(EMBEDDING).name:
                self._probes.append(self._probe_base())
                continue
            ids = np.array(self._probed).ravel().tolist()
            rows = self._streamed.rows(unit.outputs[0], sorted(set(ids)))
            table = round_trip(rows, self._method(unit.outputs[0], unit.probe))
            self._probes.append(self._streamed.embed(ids, table))

    def layer(self, index: int) -> None:
        streamed, moments = self._streamed, Moments()
        tensors = streamed.read_layer(index)
        clean = streamed.layer(index, tensors)
        base = self._probe_base()
        streamed.see = moments.see
        self._states.advance(clean)
        streamed.see = None
        HiddenStates(self._probes, [self._probed] * len(self._probes)).advance(clean)
        outputs = streamed.outputs_of(index)
        for name, output in outputs.items():
            self._keep_importance(output, moments.importance(name.removesuffix(".weight")))
        for unit in (u for u in self._units if u.layer == index):
            names = {name: out for name, out in outputs.items() if out in unit.outputs}
            changed = {
                name: round_trip(tensors[name], self._method(output, unit.probe))
                for name, output in names.items()
            }
            run = streamed.layer(index, {**tensors, **changed})
            moved = run(base, self._probed)
            mx.eval(moved)
            self._probes.append(moved)
            self._measured.append(unit)
            for name, output in names.items():
                self._errors(unit, output, sample(tensors[name]))

    def _keep_importance(self, output: OutputTensor, importance: Floats | None) -> None:
        if importance is not None:
            self._importance[output.path] = importance

    def _errors(self, unit: MeasuredUnit, output: OutputTensor, rows: Floats) -> None:
        jobs = {
            form: self._pool.submit(quantise, rows, self._method(output, form))
            for form in candidates_of(output, unit)
        }
        scale = output.num_weights / rows.size
        for form, job in jobs.items():
            _, error = job.result()
            unit.errors[form] = unit.errors.get(form, 0.0) + error.weighted * scale

    def _errors_of_end(self, unit: MeasuredUnit, output: OutputTensor) -> None:
        count = max(1, output.num_weights // logits.BLOCK)
        pieces = [
            sample(block, SAMPLE // count) for block in self._arranged.blocks(output, logits.BLOCK)
        ]
        self._errors(unit, output, np.concatenate(pieces))

    def _method(self, output: OutputTensor, form: MLXFormat) -> QuantisationMethod:
        fitted = fitting(form, output.shape)
        assert fitted is not None
        dtype = self._recipe.dtype or self._arranged.source.dtype
        return QuantisationMethod(fitted, dtype, True, self._importance.get(output.path))


def sample(array: mx.array, size: int = SAMPLE) -> Floats:
    """About `size` numbers of an array as whole rows, evenly spread: (R, in_dims) float32."""
    rows = array.reshape(-1, array.shape[-1])
    count = max(1, min(rows.shape[0], size // rows.shape[1]))
    places = np.linspace(0, rows.shape[0] - 1, count).astype(np.int32)
    return np.asarray(as_numpy(rows[mx.array(places)].astype(mx.float32)), dtype=np.float32)
