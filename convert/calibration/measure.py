"""The calibration pass over a model: second moments, the cost of each unit, reference logits.

Second moments of every matrix's inputs are always taken. Where a target size is to be met, each
unit (one matrix, or gate with up) is quantised alone in a probe format, and hidden states of a few
short sequences with that change are carried to the end beside the plain ones: so a unit's damage is
measured at the logits, with one layer of the model in memory. The results are kept in a file, so
that an interrupted conversion does not measure again.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import mlx.core as mx
import numpy as np

from ..arrange import ArrangedSource, OutputTensor, by_name
from ..arrays import Floats, as_numpy
from ..budget import MAX_WORKERS
from ..files import damaged, partial_path
from ..formats import fitting, name_of, parse_format
from ..quantise import QuantisationMethod, round_trip, sampled_error
from ..read import MLXFormat
from ..recipes import Recipe
from . import logits
from .allocation import MeasuredUnit, candidates_of, units_of
from .stream import EMBEDDING, Moments, StreamedModel, normalised
from .texts import MAX_PROBES, PROBE_LENGTH, Texts

SAMPLE = 1 << 18  # numbers of a tensor: their error stands for all

Advance = Callable[[int, int], None]  # layers done, of how many


@dataclass(slots=True)
class Measurements:
    """Results of the calibration pass."""

    importance: dict[str, Floats] = field(default_factory=dict)  # by path: (in_dims,), mean 1
    units: list[MeasuredUnit] = field(default_factory=list)


class CalibrationPass:
    """The state of one pass: hidden states of all texts after the layers so far."""

    def __init__(
        self,
        arranged: ArrangedSource,
        texts: Texts,
        recipe: Recipe,
        *,
        probing: bool,
        comparing: bool,
    ) -> None:
        self._arranged = arranged
        self._moments = Moments()
        self._streamed = StreamedModel(arranged, self._moments)
        self._texts = texts
        self._recipe = recipe
        self._length = len(texts.calibration[0])
        self._probe_length = min(PROBE_LENGTH, self._length)
        self._sequences = [texts.calibration]
        if comparing:
            self._sequences += [texts.short, texts.long]
        self._states = [self._embed(sequences) for sequences in self._sequences]
        self._probes: list[mx.array] = []  # one (P, hidden) for each of `units`
        self.measured = Measurements()
        self._units = units_of(arranged, recipe) if probing else []
        self._executor = ThreadPoolExecutor(MAX_WORKERS)
        self._probe_ends()

    def run(self, advance: Advance) -> None:
        """Run all layers."""
        count = self._arranged.config.num_layers
        for index in range(count):
            self._layer(index)
            advance(index + 1, count)

    def finish(self, references: Sequence[Path]) -> Measurements:
        """Costs of the units, and the logits of the checked texts into two files."""
        calibration, *checked = self._states
        hidden = self._streamed.normed(calibration)
        head = self._streamed.head
        self.measured.importance[head.path] = normalised(np.array(mx.sum(hidden * hidden, axis=0)))
        for path, states in zip(references, checked, strict=True):
            logits.write(path, self._arranged, self._streamed, self._streamed.normed(states))
        if self._units:
            self._costs()
        return self.measured

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)

    def _embed(self, sequences: list[list[int]]) -> mx.array:
        return self._streamed.embed([token for ids in sequences for token in ids])

    def _probe_base(self) -> mx.array:
        """The first tokens of the first sequences, (P, hidden)."""
        states = self._states[0].reshape(-1, self._length, self._states[0].shape[-1])
        picked = states[:MAX_PROBES, : self._probe_length]
        return picked.reshape(-1, picked.shape[-1])

    def _probe_ends(self) -> None:
        """Probes of the embedding, and of the output projection, which begins as the text does."""
        for unit in self._units:
            if unit.layer is not None:
                continue
            self.measured.units.append(unit)
            if unit.outputs[0].name != self._streamed.output(EMBEDDING).name:
                self._probes.append(self._probe_base())
                continue
            ids = [t for s in self._texts.calibration[:MAX_PROBES] for t in s[: self._probe_length]]
            rows = self._streamed.embedding_rows(sorted(set(ids)))
            table = round_trip(rows, self._method(unit.outputs[0], unit.probe))
            self._probes.append(self._streamed.embed(ids, table))

    def _layer(self, index: int) -> None:
        streamed = self._streamed
        tensors = streamed.read_layer(index)
        clean = streamed.layer(index, tensors)
        base = self._probe_base()
        self._moments.watching = True
        calibrated = clean(self._states[0], self._length)
        self._moments.watching = False
        pairs = list(zip(self._states, self._sequences, strict=True))
        self._states = [calibrated, *(clean(x, len(texts[0])) for x, texts in pairs[1:])]
        self._take_importance(index)
        if self._probes:
            moved = clean(mx.concatenate(self._probes), self._probe_length)
            self._probes = list(mx.split(moved, len(self._probes)))
        for unit in (u for u in self._units if u.layer == index):
            self._probe(unit, index, tensors, base)

    def _probe(
        self, unit: MeasuredUnit, index: int, tensors: Mapping[str, mx.array], base: mx.array
    ) -> None:
        names = {
            streamed_name: out
            for streamed_name, out in self._streamed.outputs_of(index).items()
            if out in unit.outputs
        }
        changed = {
            name: round_trip(tensors[name], self._method(output, unit.probe))
            for name, output in names.items()
        }
        run = self._streamed.layer(index, {**tensors, **changed})
        self._probes.append(run(base, self._probe_length))
        self.measured.units.append(unit)
        for name, output in names.items():
            self._errors(unit, output, sample(tensors[name]))

    def _errors(self, unit: MeasuredUnit, output: OutputTensor, rows: Floats) -> None:
        """The sampled error of each candidate, scaled up to the whole tensor."""
        methods = {form: self._method(output, form) for form in candidates_of(output, unit)}
        jobs = {
            form: self._executor.submit(sampled_error, rows, method)
            for form, method in methods.items()
        }
        scale = output.num_weights / rows.size
        for form, job in jobs.items():
            unit.errors[form] = unit.errors.get(form, 0.0) + job.result().weighted * scale

    def _costs(self) -> None:
        """Measure the divergence that each unit's probe causes."""
        for unit in self.measured.units:
            if unit.layer is None:
                output = unit.outputs[0]
                self._errors_of_end(unit, output)
        reference = self._streamed.normed(self._probe_base())
        states = self._streamed.normed(mx.concatenate(self._probes))
        others = states.reshape(len(self._probes), -1, states.shape[-1])
        found = logits.divergences(self._arranged, self._streamed, reference, others)
        head = self._streamed.head
        for index, unit in enumerate(self.measured.units):
            unit.kl = float(found[index])
            if head in unit.outputs:
                method = self._method(head, unit.probe)
                one = others[index : index + 1]
                unit.kl = float(
                    logits.divergences(self._arranged, self._streamed, reference, one, method)[0]
                )

    def _errors_of_end(self, unit: MeasuredUnit, output: OutputTensor) -> None:
        pieces = [
            sample(block, SAMPLE // 8)
            for block in self._arranged.blocks(output, max(SAMPLE, output.num_weights // 8))
        ]
        self._errors(unit, output, np.concatenate(pieces))

    def _take_importance(self, index: int) -> None:
        for name, output in self._streamed.outputs_of(index).items():
            found = self._moments.taken(name.removesuffix(".weight"))
            if found is not None:
                self.measured.importance[output.path] = found

    def _method(self, output: OutputTensor, form: MLXFormat) -> QuantisationMethod:
        fitted = fitting(form, output.shape)
        assert fitted is not None
        dtype = self._recipe.dtype or self._arranged.source.dtype
        return QuantisationMethod(fitted, dtype, True, self.measured.importance.get(output.path))


def sample(array: mx.array, size: int = SAMPLE) -> Floats:
    """About `size` numbers of an array as whole rows, evenly spread: (R, in_dims) float32."""
    rows = array.reshape(-1, array.shape[-1])
    count = max(1, min(rows.shape[0], size // rows.shape[1]))
    places = np.linspace(0, rows.shape[0] - 1, count).astype(np.int32)
    return np.asarray(as_numpy(rows[mx.array(places)].astype(mx.float32)), dtype=np.float32)


_UNITS = "units"
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error)


def save_measurements(path: Path, found: Measurements) -> None:
    """Write the results into one .npz file, atomically."""
    units = [
        {
            "names": [output.name for output in unit.outputs],
            "layer": unit.layer,
            "probe": name_of(unit.probe),
            "kl": unit.kl,
            "errors": {name_of(form): error for form, error in unit.errors.items()},
        }
        for unit in found.units
    ]
    partial = partial_path(path)
    with partial.open("wb") as file:
        arrays = {f"importance:{path}": values for path, values in found.importance.items()}
        np.savez(file, **arrays, **{_UNITS: np.array(json.dumps(units))})  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_measurements(path: Path, arranged: ArrangedSource) -> Measurements:
    """Read the results that `save_measurements` wrote.

    Raises:
        ConversionError: it is damaged.
    """
    try:
        return _load(path, by_name(arranged.outputs))
    except _BROKEN as error:
        raise damaged(path) from error


def _load(path: Path, outputs: Mapping[str, OutputTensor]) -> Measurements:
    with path.open("rb") as raw, np.load(raw) as file:  # np.load would not close a broken one
        importance = {
            key.removeprefix("importance:"): file[key] for key in file.files if key != _UNITS
        }
        units = json.loads(str(file[_UNITS]))
    return Measurements(
        importance,
        [
            MeasuredUnit(
                tuple(outputs[name] for name in unit["names"]),
                unit["layer"],
                _form(unit["probe"]),
                unit["kl"],
                {_form(name): error for name, error in unit["errors"].items()},
            )
            for unit in units
        ],
    )


def _form(name: str) -> MLXFormat:
    form = parse_format(name)
    if form is None:
        raise ValueError(f"{name} is no format of MLX")
    return form
