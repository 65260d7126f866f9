"""Learned scales and biases: a quantised layer is fitted to the outputs of the layer that it stands
for, one layer of the model at a time, while its codes stay (`--learn MINUTES`).

Two streams of hidden states go through the model: that of the source, and that of what is written,
with all that was learned so far. A layer learns on the second to give the outputs of the first, so
that it also makes up for some of what the layers before it lost. Adam in float32 moves each group's
scale and bias by shares of its scale; the forward pass sees them as the file's dtype rounds them.
A part of the calibration text is held out: a layer goes three quarters of the way to what was best
on that part, where this is better than what was written. So no layer becomes worse there; the last
quarter gains nothing on other text. (DWQ of mlx-lm learns the same numbers by the logits, with the
whole model and its source in memory.)

Results lie in the working folder, a file for each layer, until the files of the output have them.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
from mlx.optimizers import Adam
from numpy.typing import NDArray

from ...cache_specs import StateSpec
from ..arrange import ArrangedSource
from ..arrays import as_numpy, mx_dtype, narrow, unpack, widen
from ..files import damaged, write_at, write_file
from ..plan import ConversionPlan, PlannedTensor
from ..quantise import ErrorStats, compare
from ..recipes import ROUTERS
from ..verify import Progress, ShardReader
from ..write import Journal
from .stream import EMBEDDING, HiddenStates, LayerRun, StreamedModel

HELD_OUT = 4  # of the sequences one in so many is held out
BATCH = 1024  # tokens of a step, about
RATE = 5e-4  # of a group's scale, by which a step moves scale and bias at most, about
EVALUATED = 10  # steps between two looks at the held-out part
PATIENCE = 4  # looks without a gain that end a layer early
LEAST_GAIN = 1e-3  # of the held-out error
KEPT = 0.75  # of what was learned: the rest gains 1 % on such text, and loses on other

Parameters = dict[str, tuple[mx.array, mx.array]]  # by name: changes of scales and biases


@dataclass(frozen=True, slots=True)
class LearnedLayer:
    """The result of learning for one layer: its error on the held-out part, before and after."""

    before: float  # mean square of the error over that of the output, mean over tokens
    after: float
    steps: int
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # ErrorStats by output name

    @property
    def kept(self) -> bool:
        return bool(self.tensors)


@dataclass(slots=True)
class LayerCodes:
    """The affine matrices of one layer: codes as written, scales and biases as they will be."""

    planned: dict[str, PlannedTensor]  # by the decoder's names, as all below
    codes: dict[str, mx.array]  # (..., G, group_size) uint8
    scales: dict[str, mx.array]  # (..., G, 1) float32
    biases: dict[str, mx.array]

    def values(self, changes: Parameters) -> dict[str, mx.array]:
        """The matrices (..., in_dims) in float32, as the file's dtype makes them."""
        values = {}
        for name, codes in self.codes.items():
            scale, bias = self.rounded(name, changes)
            groups = codes.astype(mx.float32) * scale + bias
            values[name] = mx.flatten(groups, -2, -1)
        return values

    def rounded(self, name: str, changes: Parameters) -> tuple[mx.array, mx.array]:
        """Scales and biases that the file can hold; gradients pass as if they were exact."""
        dtype = mx_dtype(self.planned[name].dtype)
        scale, bias = self.scales[name], self.biases[name]
        if name in changes:
            by_scale, by_bias = changes[name]
            scale, bias = scale * (1 + by_scale), bias + scale * by_bias
        return _straight(scale, dtype), _straight(bias, dtype)


def _straight(x: mx.array, dtype: mx.Dtype) -> mx.array:
    return x + mx.stop_gradient(x.astype(dtype).astype(mx.float32) - x)


class LearningPass:
    """The calibration text on its way through the source and through what is written of it.

    Args:
        plan: of the output in `folder`.
        kept: where a file for each layer lies.
    """

    def __init__(
        self,
        arranged: ArrangedSource,
        plan: ConversionPlan,
        folder: Path,
        kept: Path,
        sequences: Sequence[Sequence[int]],
        seconds: float,
    ) -> None:
        self._streamed = StreamedModel(arranged)
        self._arranged, self._kept = arranged, kept
        self._written: dict[str, tuple[PlannedTensor, ShardReader]] = {}
        for name, tensors in plan.shards():
            reader = ShardReader(folder / name, [a.name for t in tensors for a in t.arrays])
            self._written |= {tensor.output.name: (tensor, reader) for tensor in tensors}
        self._sequences = sequences
        self._num_layers = arranged.config.num_layers
        self._seconds = seconds / self._num_layers

    def run(self, progress: Progress) -> list[LearnedLayer]:
        self._kept.mkdir(exist_ok=True)
        known = [self._file(index) for index in range(self._num_layers)]
        if not all(path.exists() for path in known):
            self._stream(progress)
        return [_load(path)[0] for path in known]

    def _stream(self, progress: Progress) -> None:
        streamed = self._streamed
        ids = [token for sequence in self._sequences for token in sequence]
        tensor, reader = self._written[streamed.output(EMBEDDING).name]
        table = [reader.values(tensor, slice(row, row + 1)) for row in sorted(set(ids))]
        rows = mx.array(np.concatenate(table))
        plain, states = (
            HiddenStates.of(x.astype(mx.float32), self._sequences)
            for x in (streamed.embed(ids), streamed.embed(ids, rows))
        )
        progress("learn", 0, self._num_layers)
        for index in range(self._num_layers):
            tensors = {n: a.astype(mx.float32) for n, a in streamed.read_layer(index).items()}
            plain.advance(streamed.layer(index, tensors))
            dense, layer = self._read(index)
            changes = self._learned(index, layer, dense, tensors, states, plain)
            states.advance(self._run(index, dense, layer, changes))
            progress("learn", index + 1, self._num_layers)

    def _learned(
        self,
        index: int,
        layer: LayerCodes,
        dense: Mapping[str, mx.array],
        source: Mapping[str, mx.array],
        states: HiddenStates,
        wanted: HiddenStates,
    ) -> Parameters:
        """The changes that the layer learns, or that an earlier run has kept; {}: none."""
        path = self._file(index)
        if path.exists():
            _, arrays = _load(path)
            for name, tensor in layer.planned.items():
                if tensor.output.name in arrays:
                    layer.scales[name], layer.biases[name] = arrays[tensor.output.name]
            return {}
        if self._has_gradients(index, source):
            learned, changes = self._fit(index, layer, dense, states, wanted)
        else:
            learned, changes = LearnedLayer(0.0, 0.0, 0), {}
        values = layer.values(changes)
        output_names = {name: layer.planned[name].output.name for name in changes}
        errors = {
            output_names[name]: asdict(_error(values[name], source[name])) for name in changes
        }
        arrays = {output_names[name]: layer.rounded(name, changes) for name in changes}
        _save(path, replace(learned, tensors=errors), arrays)
        return changes

    def _fit(
        self,
        index: int,
        layer: LayerCodes,
        dense: Mapping[str, mx.array],
        states: HiddenStates,
        wanted: HiddenStates,
    ) -> tuple[LearnedLayer, Parameters]:
        started = time.monotonic()
        split = _Split(states, wanted, self._sequences)
        zero = {
            name: (mx.zeros_like(layer.scales[name]), mx.zeros_like(layer.biases[name]))
            for name in layer.codes
        }

        def loss(changes: Parameters, x: mx.array, y: mx.array, ids: mx.array) -> mx.array:
            run = self._run(index, dense, layer, changes)
            return _relative_error(run(x, ids), y)

        gradients = mx.value_and_grad(loss)
        optimizer, changes, best = Adam(learning_rate=RATE), zero, dict[str, Any]()
        before = least = split.held_out(partial(loss, {}))
        steps = misses = 0
        while misses < PATIENCE and time.monotonic() - started < self._seconds and changes:
            _, grads = gradients(changes, *split.batch())
            changes = optimizer.apply_gradients(grads, changes)
            mx.eval(changes, optimizer.state)
            steps += 1
            if steps % EVALUATED:
                continue
            error = split.held_out(partial(loss, changes))
            misses = 0 if error < least * (1 - LEAST_GAIN) else misses + 1
            if error < least:
                least, best = error, dict(changes)
        best = {name: (KEPT * scale, KEPT * bias) for name, (scale, bias) in best.items()}
        after = split.held_out(partial(loss, best)) if best else before
        return LearnedLayer(before, min(before, after), steps), best if after < before else {}

    def _run(
        self, index: int, dense: Mapping[str, mx.array], layer: LayerCodes, changes: Parameters
    ) -> LayerRun:
        return self._streamed.layer(index, {**dense, **layer.values(changes)})

    def _has_gradients(self, index: int, tensors: Mapping[str, mx.array]) -> bool:
        """Recurrence is a kernel without a gradient where there is Metal."""
        specs = self._streamed.layer(index, tensors).model.cache_specs
        recurs = any(isinstance(spec, StateSpec) for spec in specs)
        return not (recurs and mx.default_device() == mx.Device(mx.gpu))

    def _read(self, index: int) -> tuple[dict[str, mx.array], LayerCodes]:
        """A written layer: what does not learn, in float32, and what does."""
        dense: dict[str, mx.array] = {}
        layer = LayerCodes({}, {}, {}, {})
        for name, output in self._streamed.outputs_of(index).items():
            tensor, reader = self._written[output.name]
            form = tensor.form
            if output.in_files:  # the source's is read, row by row
                dense[name] = self._streamed.zeros(output)
                continue
            fixed = tensor.packed or ROUTERS.search(output.path)  # choices have no gradient
            if form is None or form.mode != "affine" or fixed:
                whole = reader.values(tensor, slice(0, output.num_weights))
                dense[name] = mx.array(whole).reshape(output.shape)
                continue
            weight, *others = (reader.rows(array.name) for array in tensor.arrays)
            words = np.asarray(weight, np.uint32)
            groups = (*output.shape[:-1], -1, form.group_size)
            codes = unpack(words, form.bits, output.shape[-1])
            layer.planned[name] = tensor
            layer.codes[name] = mx.array(codes.reshape(groups))
            layer.scales[name], layer.biases[name] = (
                mx.array(widen(part, tensor.dtype)).reshape(*groups[:-1], 1) for part in others
            )
        return dense, layer

    def _file(self, index: int) -> Path:
        return self._kept / f"{index}.npz"


def _relative_error(output: mx.array, wanted: mx.array) -> mx.array:
    """Squared error over squared output, a token's own: large states of few tokens do not rule."""
    difference = (output - wanted).square().mean(axis=-1)
    return (difference / wanted.square().mean(axis=-1)).mean()


def _error(values: mx.array, source: mx.array) -> ErrorStats:
    flat = (np.asarray(as_numpy(a), np.float32).reshape(-1, a.shape[-1]) for a in (values, source))
    return compare(*flat)


class _Split:
    def __init__(
        self, states: HiddenStates, wanted: HiddenStates, sequences: Sequence[Sequence[int]]
    ) -> None:
        self._pairs, count = (states, wanted), len(sequences)
        self._ids = mx.array(np.array(sequences, np.int32))
        held = set(range(HELD_OUT - 1, count, HELD_OUT)) or {0}
        self._held = sorted(held)
        self._taught = [i for i in range(count) if i not in held] or [0]
        self._size = min(len(self._taught), max(1, BATCH // states.length))
        self._order = np.random.default_rng(0)

    def batch(self) -> list[mx.array]:
        return self._picked(self._order.permutation(self._taught)[: self._size].tolist())

    def held_out(self, error: Any) -> float:
        parts = [
            self._held[start : start + self._size]
            for start in range(0, len(self._held), self._size)
        ]
        errors = [float(error(*self._picked(part))) * len(part) for part in parts]
        return sum(errors) / len(self._held)

    def _picked(self, sequences: list[int]) -> list[mx.array]:
        picked = [states.picked(sequences) for states in self._pairs]
        return [*picked, self._ids[mx.array(sequences)]]


_RESULT = "result"


def _save(
    path: Path, learned: LearnedLayer, arrays: Mapping[str, tuple[mx.array, mx.array]]
) -> None:
    """One file, which is there whole or not at all."""
    data: dict[str, NDArray[Any]] = {_RESULT: np.array(json.dumps(asdict(learned)))}
    for name, parts in arrays.items():
        for kind, part in zip(("scales", "biases"), parts, strict=True):
            data[f"{kind}:{name}"] = np.array(part)
    file = BytesIO()
    np.savez(file, **data)  # type: ignore[arg-type]
    write_file(path, file.getvalue())


def _load(path: Path) -> tuple[LearnedLayer, dict[str, tuple[mx.array, mx.array]]]:
    try:
        with path.open("rb") as raw, np.load(raw) as file:
            learned = LearnedLayer(**json.loads(str(file[_RESULT])))
            return learned, {
                name: (mx.array(file[f"scales:{name}"]), mx.array(file[f"biases:{name}"]))
                for name in learned.tensors
            }
    except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
        raise damaged(path) from error


def put_into_file(
    path: Path, tensors: Sequence[PlannedTensor], kept: Path, journal: Journal
) -> None:
    """Write what was learned over the scales and biases of a finished file, and into the journal.

    The codes stay. Doing it again, after an interruption, does the same.
    """
    learned: dict[str, tuple[dict[str, Any], tuple[mx.array, mx.array]]] = {}
    for file in kept.glob("*.npz"):
        layer, arrays = _load(file)
        learned |= {name: (error, arrays[name]) for name, error in layer.tensors.items()}
    reader = ShardReader(path, [array.name for tensor in tensors for array in tensor.arrays])
    for tensor in (t for t in tensors if t.output.name in learned):
        error, parts = learned[tensor.output.name]
        entry = journal.tensors[tensor.output.name]
        checksums = entry["checksums"][:1]
        for array, part in zip(tensor.arrays[1:], parts, strict=True):
            data = narrow(np.array(part), tensor.dtype)
            places = reader.places(array.name)
            for place, piece in zip(places, np.split(data.reshape(-1), len(places)), strict=True):
                write_at(path, place, piece)
            checksums.append(crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data))
        journal.add_tensors({tensor.output.name: entry | {"error": error, "checksums": checksums}})


def summary(layers: Sequence[LearnedLayer]) -> str:
    kept = [layer for layer in layers if layer.kept]
    if not kept:
        return "No layer learned scales that were better on the text that is held out."
    ratio = np.exp(np.mean([np.log(layer.after / layer.before) for layer in kept]))
    return (
        f"{len(kept)} of {len(layers)} layers have learned scales: the error of their outputs on "
        f"held-out text fell by {1 - ratio:.0%} (geometric mean)."
    )
