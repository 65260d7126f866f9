"""The check of a definition that was loaded: ragged chunks and steps beside mlx-lm's own run."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...core import KVSpec
from ...layers.step import Step
from ...metal_kernels.paged_attention import Softmax
from .alone import AloneModel, Kept
from .config import ZooConfig
from .definitions import Definition, with_narrow_windows
from .flat import FlatModel, trace
from .loading import Formats, quantise
from .private_copy import one_line

NARROW = 6  # tokens of every window during the check, so that sequences outgrow it
LENGTHS = (19, 9)  # tokens of the sequences of the check
CHUNKS = ((9, 1, 9), (3, 5, 1))  # tokens of each in the steps of the check
TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 0.1, mx.float16: 0.05}  # of the spread of the logits


def find_cut(definition: Definition) -> None:
    """See whether logits can be had of a few hidden states; shapes only."""
    ids = mx.zeros((1, 3), mx.int32)
    whole = definition(ids, definition.own_caches())
    try:
        hidden = definition.hidden(ids, definition.own_caches())
        if hidden.shape[:2] != (1, 3) or definition.logits(hidden[0]).shape != whole.shape[1:]:
            definition.uncut()
    except Exception:  # the fault boundary of foreign code: then it runs uncut
        definition.uncut()


def weights_dtype(definition: Definition) -> mx.Dtype:
    """Of activations: that of the logits, where these are no wider than the weights."""
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
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """As of `AttentionCache`."""
        outputs, start = [], 0
        for sequence, count in enumerate(self.counts):
            rows = slice(start, start + count)
            own = [part[rows].swapaxes(0, 1)[None] for part in (queries, keys, values)]
            outputs.append(self._attend_one(sequence, own, softmax))
            start += count
        return mx.concatenate(outputs)

    def _attend_one(
        self,
        sequence: int,
        own: Sequence[mx.array],
        softmax: Softmax,
    ) -> mx.array:
        """Queries, keys and values (1, heads, L, ·) of one sequence -> (L, H * V)."""
        queries, keys, values = own
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
        found = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=softmax.scale, mask=mask, sinks=softmax.sinks
        )
        return found[0].swapaxes(0, 1).flatten(1)


def _ids(vocab_size: int) -> list[mx.array]:
    """The token ids of the check's sequences."""
    return [
        mx.array([(7 + 31 * i * i + 11 * number) % vocab_size for i in range(length)], mx.int32)
        for number, length in enumerate(LENGTHS)
    ]


def problem_batched(config: ZooConfig, definition: Definition) -> str | None:
    """How ragged steps of all sequences differ from mlx-lm's own run; None: not."""
    try:
        traced = trace(definition)  # anew: the dtypes of keys follow from the weights
        model = FlatModel(config, definition, traced)
        layers = [DenseLayer(spec) for spec in traced.specs]
        ids = _ids(traced.vocab_size)
        found: list[list[mx.array]] = [[] for _ in ids]
        done = [0] * len(ids)
        for counts in zip(*CHUNKS, strict=True):
            spans = [slice(at, at + count) for at, count in zip(done, counts, strict=True)]
            for layer in layers:
                layer.counts = counts
            positions = mx.concatenate([mx.arange(span.start, span.stop) for span in spans])
            flat = mx.concatenate([some[span] for some, span in zip(ids, spans, strict=True)])
            step = Step(positions, dict(zip(model.mixers, layers, strict=True)))
            logits = model.logits(model(flat, step))
            first, second = mx.split(logits, [counts[0]])
            found[0].append(first)
            found[1].append(second)
            done = [span.stop for span in spans]
        return _compare(definition, ids, [mx.concatenate(parts) for parts in found])
    except Exception as error:  # the fault boundary of foreign code
        return f"fails ({one_line(f'{type(error).__name__}: {error}', 90)})"


def problem_alone(model: AloneModel) -> str | None:
    """How chunks and steps differ from one run over the whole sequence; None: not."""
    definition = model.definition
    ids, chunks = _ids(model.config.vocab_size)[0], CHUNKS[0]
    try:
        kept, parts, at = Kept(definition.own_caches()), [], 0
        for count in chunks:
            hidden = definition.hidden(ids[None, at : at + count], kept.caches)[0]
            parts.append(definition.logits(hidden))
            at += count
        return _compare(definition, [ids], [mx.concatenate(parts)])
    except Exception as error:  # the fault boundary of foreign code
        return f"fails ({one_line(f'{type(error).__name__}: {error}', 90)})"


def _compare(
    definition: Definition, ids: Sequence[mx.array], found: Sequence[mx.array]
) -> str | None:
    """How logits (L, vocab_size) of sequences differ from mlx-lm's own run; None: not.

    In float32 every position must agree; with 16 bits, where experts may be chosen differently on
    the last bit, most must.
    """
    own = [definition(some[None], definition.own_caches())[0] for some in ids]
    expected, logits = mx.concatenate(own), mx.concatenate(list(found))
    dtype = weights_dtype(definition)
    expected, logits = expected.astype(mx.float32), logits.astype(mx.float32)
    spread = mx.sqrt(mx.mean(mx.var(expected, axis=-1)))
    errors = mx.sqrt(mx.mean((logits - expected) ** 2, axis=-1)) / mx.maximum(spread, 1e-6)
    worst = errors.max() if dtype == mx.float32 else mx.sort(errors)[len(errors) // 2]
    difference = float(np.array(worst))
    if not difference <= TOLERANCE[dtype]:  # nor is NaN
        return f"gives other logits than mlx-lm's own run (by {difference:.2g} of their spread)"
    return None
