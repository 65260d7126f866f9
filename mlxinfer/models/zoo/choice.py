"""Loads a definition: batched or alone, and the check that what was chosen is right.

The choice is made on shapes, before any weight is read. The check is made on the weights: logits of
a few sequences, in ragged chunks and steps as the engine would run them, beside those that mlx-lm's
own forward pass gives. A batched model that differs runs alone. One that differs even then, which
would be a fault of the definition's caches, is refused.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...cache_specs import CacheSpec, KVSpec
from ...errors import CheckpointError, UnsupportedModelError
from ...layers.step import Step
from ...memory import raise_file_limit
from ...metal_kernels.paged_attention import Softmax
from ..quantization import Quantization, format_of_shapes
from ..registry import SUPPORTED
from ..weights.files import read_headers
from ..weights.tensors import FLOATS, choose_dtype
from .compared import refuse_unread, refuse_wrong, unsupported, verdict_of
from .definitions import (
    Definition,
    architectures,
    installed,
    module_of,
    one_line,
    with_narrow_windows,
)
from .running import (
    AloneModel,
    FlatModel,
    NotFlatError,
    SequenceCaches,
    ZooConfig,
    kept_by,
    read_config,
    trace,
)
from .spelling import classes_of

Formats = dict[str, dict[str, Any]]  # path of a layer -> arguments of its quantised form


def lazy_arrays(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a checkpoint, by name, read when a definition has joined them.

    Raises:
        CheckpointError: a file that is broken.
        ModelNotFoundError: there is none.
    """
    tensors: dict[str, mx.array] = {}
    headers = read_headers(folder)
    raise_file_limit(len(headers))
    for path, header in headers.items():
        try:
            arrays = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        assert isinstance(arrays, dict), path
        assert arrays.keys() == header.keys(), path
        tensors.update(arrays)
    return tensors


def load_weights(
    definition: Definition,
    tensors: dict[str, mx.array],
    quantization: Quantization | None,
    dtype: str,
) -> Formats:
    """Put the tensors of a checkpoint into a definition, and evaluate them.

    Args:
        tensors: by the checkpoint's names, which the definition turns into its own.
        dtype: see `models.load`.

    Returns:
        The layers that are quantised.
    """
    target = choose_dtype(tensors, dtype)
    cast = target if dtype != "auto" or target == mx.float32 else None
    formats = fill(definition, tensors, quantization, cast)
    with _fitting(definition):
        mx.eval(definition.model.parameters())
    return formats


def fill(
    definition: Definition,
    tensors: dict[str, mx.array],
    quantization: Quantization | None,
    cast: mx.Dtype | None = None,
) -> Formats:
    """As `load_weights`, but nothing is evaluated. `cast`: of dense numbers; None: as they are."""
    model = definition.model
    with _fitting(definition):
        arrays = definition.made_of(tensors)
        formats = _formats(model, arrays, quantization)
        quantise(model, formats)
        if cast is not None:
            arrays = {n: _cast(n, t, cast, definition) for n, t in arrays.items()}
        model.load_weights(list(arrays.items()), strict=True)
    return formats


@contextmanager
def _fitting(definition: Definition) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"The tensors of this checkpoint do not fit mlx-lm's definition of {definition.name}: "
            f"{one_line(str(error), 400)}"
        ) from error


def quantise(model: nn.Module, formats: Formats) -> None:
    if formats:
        nn.quantize(model, class_predicate=lambda path, module: formats.get(path, False))


def _formats(
    model: nn.Module, tensors: Mapping[str, mx.array], quantization: Quantization | None
) -> Formats:
    formats: Formats = {}
    for path, module in model.named_modules():
        scales, words = tensors.get(f"{path}.scales"), tensors.get(f"{path}.weight")
        if scales is None or words is None or getattr(module, "to_quantized", None) is None:
            continue
        if quantization is None:
            raise CheckpointError(
                f"Tensor {path + '.scales'!r} belongs to a quantised layer, but config.json has no "
                "quantization."
            )
        fitting = format_of_shapes(
            module.weight.shape[-1],
            words.shape[-1],
            scales.shape[-1],
            integer_scales=scales.dtype == mx.uint8,
        )
        form = quantization.of(path, fitting)
        formats[path] = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    return formats


def _cast(name: str, tensor: mx.array, dtype: mx.Dtype, definition: Definition) -> mx.array:
    """A tensor in the activations' dtype, unless the definition wants it to stay wide."""
    if tensor.dtype not in FLOATS:
        return tensor
    predicate = getattr(definition.model, "cast_predicate", None)
    if predicate is not None and dtype != mx.float32 and not predicate(name):
        return tensor
    return tensor.astype(dtype)


NARROW = 6  # tokens of every window during the check, so that sequences outgrow it
LENGTHS = (19, 9)  # tokens of the sequences of the check
CHUNKS = ((9, 1, 9), (3, 5, 1))  # tokens of each in the steps of the check
TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 0.1, mx.float16: 0.05}  # of the spread of the logits


def find_cut(definition: Definition) -> None:
    """Find where the output projection can be cut off. Uses shapes only."""
    ids = mx.zeros((1, 3), mx.int32)
    whole = definition(ids, definition.own_caches())
    try:
        hidden = definition.hidden(ids, definition.own_caches())
        if hidden.shape[:2] != (1, 3) or definition.logits(hidden[0]).shape != whole.shape[1:]:
            definition.uncut()
    except Exception:  # the fault boundary of foreign code: then it runs uncut
        definition.uncut()


def weights_dtype(definition: Definition) -> mx.Dtype:
    """The dtype of activations: that of the logits, unless it is wider than the weights' dtype."""
    weights = [a.dtype for _, a in tree_flatten(definition.model.parameters()) if a.ndim > 1]
    floats = [dtype for dtype in weights if dtype in TOLERANCE]
    return max(set(floats), key=floats.count, default=mx.float32)


def narrow_twin(definition: Definition, formats: Formats) -> Definition:
    """The same weights behind windows so narrow that a short check goes past them.

    The definition itself where it has no windows, or cannot have narrow ones.
    """
    twin = with_narrow_windows(definition, NARROW)
    if twin is None:
        return definition
    quantise(twin.model, formats)
    twin.model.update(definition.model.parameters())
    try:
        trace(twin)
        find_cut(twin)
    except Exception:  # the fault boundary of foreign code: such windows do not fit it
        return definition
    return twin


class DenseLayer:
    """The plainest cache of an attention layer: keys and values of each sequence, side by side."""

    def __init__(self, spec: KVSpec) -> None:
        self._window = spec.window
        self._past: dict[int, tuple[mx.array, mx.array]] = {}
        self.counts: Sequence[int] = ()  # tokens of each sequence in the step

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax
    ) -> mx.array:
        outputs, start = [], 0
        for sequence, count in enumerate(self.counts):
            rows = slice(start, start + count)
            rows_of = [part[rows].swapaxes(0, 1)[None] for part in (queries, keys, values)]
            outputs.append(self._attend_one(sequence, rows_of, softmax))
            start += count
        return mx.concatenate(outputs)

    def _attend_one(self, sequence: int, parts: Sequence[mx.array], softmax: Softmax) -> mx.array:
        """Queries, keys and values (1, heads, L, ·) of one sequence -> (L, H * V)."""
        queries, keys, values = parts
        if sequence in self._past:
            past_keys, past_values = self._past[sequence]
            keys = mx.concatenate([past_keys, keys], axis=2)
            values = mx.concatenate([past_values, values], axis=2)
        self._past[sequence] = keys, values
        count, total = queries.shape[2], keys.shape[2]
        at, of = mx.arange(total - count, total)[:, None], mx.arange(total)
        mask = of <= at
        if self._window is not None:
            mask = mask & (of > at - self._window)
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=softmax.scale, mask=mask, sinks=softmax.sinks
        )
        return attended[0].swapaxes(0, 1).flatten(1)


def _ids(vocab_size: int) -> list[mx.array]:
    return [
        mx.array([(7 + 31 * i * i + 11 * number) % vocab_size for i in range(length)], mx.int32)
        for number, length in enumerate(LENGTHS)
    ]


def problem_batched(config: ZooConfig, definition: Definition) -> str | None:
    """Compare ragged steps of all sequences with mlx-lm's own run; None: they agree."""
    try:
        traced = trace(definition)  # anew: the dtypes of keys follow from the weights
        model = FlatModel(config, definition, traced)
        layers = [DenseLayer(spec) for spec in traced.specs]
        ids = _ids(traced.vocab_size)
        hidden: list[list[mx.array]] = [[] for _ in ids]
        done = [0] * len(ids)
        for counts in zip(*CHUNKS, strict=True):
            spans = [slice(at, at + count) for at, count in zip(done, counts, strict=True)]
            for layer in layers:
                layer.counts = counts
            positions = mx.concatenate([mx.arange(span.start, span.stop) for span in spans])
            flat = mx.concatenate([tokens[span] for tokens, span in zip(ids, spans, strict=True)])
            step = Step(positions, dict(zip(model.mixers, layers, strict=True)))
            logits = model.logits(model(flat, step))
            first, second = mx.split(logits, [counts[0]])
            hidden[0].append(first)
            hidden[1].append(second)
            done = [span.stop for span in spans]
        return _compare(definition, ids, [mx.concatenate(parts) for parts in hidden])
    except Exception as error:  # the fault boundary of foreign code
        return f"fails ({one_line(f'{type(error).__name__}: {error}', 90)})"


def problem_alone(model: AloneModel) -> str | None:
    """Compare chunks and steps with one run over the whole sequence; None: they agree."""
    definition = model.definition
    ids, chunks = _ids(model.config.vocab_size)[0], CHUNKS[0]
    try:
        held, parts, at = SequenceCaches(definition.own_caches()), [], 0
        for count in chunks:
            hidden = definition.hidden(ids[None, at : at + count], held.caches)[0]
            parts.append(definition.logits(hidden))
            at += count
        return _compare(definition, [ids], [mx.concatenate(parts)])
    except Exception as error:  # the fault boundary of foreign code
        return f"fails ({one_line(f'{type(error).__name__}: {error}', 90)})"


def _compare(
    definition: Definition, ids: Sequence[mx.array], hidden: Sequence[mx.array]
) -> str | None:
    """Compare logits (L, vocab_size) of sequences with mlx-lm's own run; None: they agree.

    In float32 every position must agree; with 16 bits, where experts may be chosen differently on
    the last bit, most must.
    """
    alone = [definition(tokens[None], definition.own_caches())[0] for tokens in ids]
    expected, logits = mx.concatenate(alone), mx.concatenate(list(hidden))
    dtype = weights_dtype(definition)
    expected, logits = expected.astype(mx.float32), logits.astype(mx.float32)
    spread = mx.sqrt(mx.mean(mx.var(expected, axis=-1)))
    errors = mx.sqrt(mx.mean((logits - expected) ** 2, axis=-1)) / mx.maximum(spread, 1e-6)
    worst = errors.max() if dtype == mx.float32 else mx.sort(errors)[len(errors) // 2]
    difference = float(np.array(worst))
    if not difference <= TOLERANCE[dtype]:  # nor is NaN
        return f"gives other logits than mlx-lm's own run (by {difference:.2g} of their spread)"
    return None


def choose(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[ZooConfig, Definition]:
    """Choose the definition that runs an architecture, from its config alone."""
    model_type = str(raw.get("model_type"))
    refuse_wrong(raw)
    module = module_of(model_type, classes_of(raw))
    if module is None:
        raise _unknown(model_type)
    refuse_unread(raw, inspect.signature(module.ModelArgs).parameters)
    definition = Definition.of(module, raw)
    specs: Sequence[CacheSpec]
    because = None
    try:
        traced = trace(definition)
        specs, vocab_size = traced.specs, traced.vocab_size
    except NotFlatError as error:
        because = str(error)
        specs, vocab_size = kept_alone(definition)
    config = read_config(
        raw,
        generation,
        parameters=[name for name, _ in tree_flatten(definition.model.parameters())],
        vocab_size=vocab_size,
        cache_specs=specs,
        alone_because=because,
    )
    return config, definition


def _unknown(model_type: str) -> UnsupportedModelError:
    """The error for an architecture that nothing defines, with the reason or similar names."""
    if model_type in unsupported():
        verdict, why = verdict_of(model_type)
        return UnsupportedModelError(f"The architecture {model_type!r} is {verdict}: {why}.")
    alike = get_close_matches(model_type, sorted({*SUPPORTED, *architectures()}), n=3)
    runs = f" Alike, and defined: {', '.join(alike)}." if alike else ""
    return UnsupportedModelError(
        f"The architecture {model_type[:60]!r} is defined neither here nor by mlx-lm "
        f"{installed()}; a newer mlx-lm may have it.{runs}"
    )


def kept_alone(definition: Definition) -> tuple[list[CacheSpec], int]:
    """The arrays that a sequence keeps in mlx-lm's caches, and the size of the vocabulary."""
    try:
        logits = definition(mx.zeros((1, 2), mx.int32), definition.own_caches())
        return [kept_by(definition, mx.float32)], logits.shape[-1]
    except Exception as error:  # the fault boundary of foreign code
        raise _fails(definition, error) from error


def _fails(definition: Definition, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"mlx-lm's definition of {definition.name} does not run here: "
        f"{one_line(f'{type(error).__name__}: {error}')}"
    )


def build(config: ZooConfig, definition: Definition, formats: Formats) -> FlatModel | AloneModel:
    """The model of a definition that has its weights, checked.

    Args:
        config: as `choose` gave it.
    """
    try:
        find_cut(definition)
    except Exception as error:  # the fault boundary of foreign code
        raise _fails(definition, error) from error
    because = config.alone_because
    if because is None:
        because = problem_batched(config, narrow_twin(definition, formats))
        if because is None:
            return FlatModel(config, definition, trace(definition))
    dtype = weights_dtype(definition)
    model = AloneModel(replace(config, alone_because=because), definition, dtype)
    problem = problem_alone(model)
    if problem is not None:
        raise UnsupportedModelError(
            f"mlx-lm's definition of {definition.name} is not used: in chunks and steps it "
            f"{problem}."
        )
    return model
