"""Tokens of a span see all of the span, whatever else is in the step, as dense attention does."""

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import PAGE, Bits, Tokens, layer_of, prepare
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache import chunks
from mlxinfer.cache.inputs import StepMetadata
from mlxinfer.cache.keys_values import KeyValueLayer
from mlxinfer.cache.pages import AttentionWindow, PageTable
from mlxinfer.cache_specs import KVSpec
from mlxinfer.engine.batch import step_metadata
from mlxinfer.metal_kernels import prompt_attention
from mlxinfer.metal_kernels.paged_attention import Softmax

HEADS, GROUP, DIM, PAGES = 2, 2, 32, 12
SCALE = 0.2


class Sequence:
    """One sequence with the queries, keys and values of all of its tokens, and its spans."""

    def __init__(self, slot: int, length: int, spans: list[tuple[int, int]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        shapes = [(length, heads, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
        self.arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        self.slot, self.length, self.done, self.sealed = slot, length, 0, 0
        self.table = PageTable(PAGE, pages=range(slot * PAGES, (slot + 1) * PAGES))
        positions = np.arange(length, dtype=np.int32)
        self.spans = np.stack([positions, positions + 1])
        for start, stop in spans:
            self.spans[:, start:stop] = [[start], [stop]]

    def reference(self, window: AttentionWindow) -> np.ndarray:
        """(length, heads * DIM) by definition, over all tokens at once."""
        queries, keys, values = self.arrays
        positions = np.arange(self.length)
        begins = window.lowest_of(positions.astype(np.int32))
        seen = (positions >= begins[:, None]) | (positions < window.sinks)
        stops = self.spans[1] if window.sees_spans else positions + 1
        seen &= positions < stops[:, None]
        keys, values = np.repeat(keys, GROUP, axis=1), np.repeat(values, GROUP, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * SCALE
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values).reshape(self.length, -1)


def step(
    layer: KeyValueLayer, parts: list[tuple[Sequence, int]], window: AttentionWindow
) -> dict[Sequence, np.ndarray]:
    """So many next tokens of each sequence; more than 8 are a prefill chunk."""
    parts = sorted(parts, key=lambda part: (part[1] > 8, part[1] > 1))
    row, tokens = 0, []
    for one, count in parts:
        seal(layer, one, is_chunk=count > 8)
        tokens.append(Tokens(row, one.done, count, one.sealed, one.slot, [one.table]))
        row += count
    causal = step_metadata(
        [t for t in tokens if t.num_tokens <= 8], [t for t in tokens if t.num_tokens > 8]
    )
    rows = [(one, slice(one.done, one.done + count)) for one, count in parts]
    spans = np.concatenate([one.spans[:, some] for one, some in rows], axis=1)
    metadata = StepMetadata(causal.short, causal.long, causal.positions, spans=spans)
    prepare(layer, metadata, window)
    arrays = [
        mx.array(np.concatenate([one.arrays[i][some] for one, some in rows])) for i in range(3)
    ]
    outputs = np.array(layer.attend(*arrays, Softmax(SCALE)))
    check_some_rows(layer, parts, arrays[0], outputs)
    outputs_of = {}
    for token, (one, count) in zip(tokens, parts, strict=True):
        outputs_of[one] = outputs[token.row : token.row + count]
        one.done += count
        if count > 8:
            one.sealed = one.done - one.done % PAGE
    return outputs_of


def check_some_rows(
    layer: KeyValueLayer, parts: list[tuple[Sequence, int]], queries: mx.array, outputs: np.ndarray
) -> None:
    """The last rows of each part, by themselves, attend as they do among all rows."""
    rng, row, rows = np.random.default_rng(len(outputs)), 0, []
    for _, count in parts:
        row += count
        rows += range(row - int(rng.integers(0, count + 1)), row)
    some = np.array(rows or [row - 1], np.int32)
    again = np.array(layer.attend_again(queries[mx.array(some)], Softmax(SCALE), some))
    np.testing.assert_allclose(again, outputs[some], atol=2e-5, rtol=1e-4)


def attended(
    window: AttentionWindow, bits: Bits, lengths: list[tuple[int, int]], seed: int
) -> None:
    """Sequences of (text before, tokens of a span), then eight more; all beside each other."""
    layer = layer_of(
        KVSpec(HEADS, DIM, DIM, window.size, window.sinks),
        bits,
        num_pages=PAGES * len(lengths),
        num_slots=len(lengths),
    )
    sequences = [
        Sequence(slot, before + span + 8, [(before, before + span)], seed + slot)
        for slot, (before, span) in enumerate(lengths)
    ]
    outputs_of: dict[Sequence, list[np.ndarray]] = {one: [] for one in sequences}
    for one, (before, _) in zip(sequences, lengths, strict=True):  # the text, one by one
        for first in range(0, before, PAGE):  # whole pages but the last
            count = min(PAGE, before - first)
            outputs_of[one].append(step(layer, [(one, count)], window)[one])
    spans = [(one, span) for one, (_, span) in zip(sequences, lengths, strict=True)]
    for parts in (spans, [(one, 1) for one in sequences], [(one, 7) for one in sequences]):
        for one, outputs in step(layer, parts, window).items():
            outputs_of[one].append(outputs)
    for one in sequences:
        np.testing.assert_allclose(
            np.concatenate(outputs_of[one]), one.reference(window), atol=2e-5, rtol=1e-4
        )


def seal(layer: KeyValueLayer, one: Sequence, *, is_chunk: bool) -> None:
    """Move whole pages out of the tail; a chunk reads pages alone, so all before it."""
    whole = one.done - one.done % PAGE
    positions = np.arange(one.sealed, one.done if is_chunk else whole, dtype=np.int32)
    one.sealed = whole
    if len(positions):
        slots = np.full_like(positions, one.slot)
        targets = mx.array(one.slot * PAGES * PAGE + positions)
        layer.seal(mx.array(slots), mx.array(positions % (2 * PAGE)), targets, targets)


WINDOWS = [
    AttentionWindow(size, sinks, sees_spans=True)
    for size, sinks in ((None, 0), (20, 0), (40, 3), (7, 0))
]
BLIND = AttentionWindow(40)


@given(
    window=st.sampled_from([*WINDOWS, BLIND]),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_a_span_in_one_step_is_full_attention_over_it(
    window: AttentionWindow, lengths: list[tuple[int, int]], seed: int
) -> None:
    attended(window, (None, None), lengths, seed)


@pytest.mark.parametrize("window", WINDOWS[:3])
def test_several_blocks_of_keys(window: AttentionWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, prompt_attention):
        monkeypatch.setattr(module, "KEY_BLOCK", 32)
        monkeypatch.setattr(module, "QUERY_BLOCK", 16)
    attended(window, (None, None), [(37, 60), (5, 9)], 1)


def test_spans_attend_in_plain_mlx_though_kernels_are_ready() -> None:
    """Here is no GPU: a kernel could not run."""
    layer = layer_of(KVSpec(HEADS, DIM, DIM), num_pages=2 * PAGES, num_slots=2)
    layer.ready = lambda _: True
    layer.fastest_prompt = lambda rows, load, ways: ways[-1]
    sequences = [Sequence(slot, 20, [(0, 20)], slot) for slot in range(2)]
    sequences[1].spans[:] = [[0], [6]]
    outputs_of = step(layer, list(zip(sequences, (20, 6), strict=True)), WINDOWS[0])
    for one, count in zip(sequences, (20, 6), strict=True):
        expected = one.reference(WINDOWS[0])[:count]
        np.testing.assert_allclose(outputs_of[one], expected, atol=2e-5, rtol=1e-4)
