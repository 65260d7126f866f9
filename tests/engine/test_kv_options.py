"""Windows with sinks and stored bits, in ragged chunks, against dense attention under a mask."""

import os
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness, prompt, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from models.dense_kv import DenseCache, DenseLayerKV

from mlxinfer.cache.keys_values import KeyValueLayer, LessBias, rotatable
from mlxinfer.cache.kv import KVCache
from mlxinfer.cache.layout import LayerCache, lay_out
from mlxinfer.cache_specs import KVSpec
from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.errors import InvalidRequestError
from mlxinfer.layers.attention import Attention
from mlxinfer.layers.rope import RopeSpec, rope_of
from mlxinfer.metal_kernels.stored import FORMATS, group_size
from mlxinfer.models.decoder import Model

BITS = [(None, None), (8, 8), (8, 4), (4, 4)]


class StoredKV(DenseLayerKV):
    """Dense attention over what the formats make of keys and values."""

    def __init__(self, layer: LayerCache, mixer: Attention) -> None:
        super().__init__(layer.spec)
        self.formats = layer.formats
        self.rotates = self.formats[0].rotates
        has_bias = self.rotates and mixer.args.key_bias is not None
        self.turned_bias = mixer.turned_bias if has_bias else None

    def attend(self, queries, keys, values, softmax, choice=None, rows=None):  # type: ignore[no-untyped-def]
        if self.rotates:
            queries, keys = mx.hadamard_transform(queries), mx.hadamard_transform(keys)
        bias = mx.zeros(keys.shape)
        if self.turned_bias is not None:
            ((name, _),) = self.segments
            heads = mx.arange(keys.shape[1])
            position = len(self.past[name][0]) if name in self.past else 0
            bias = mx.hadamard_transform(self.turned_bias(mx.full(heads.shape, position), heads))
        of_keys, of_values = self.formats
        keys = of_keys.decode(of_keys.encode(keys - bias), mx.float32) + bias
        rotates_values = of_values.rotates_values(values.shape[-1])
        turn = mx.hadamard_transform if rotates_values else mx.array
        values = turn(of_values.decode(of_values.encode(turn(values)), mx.float32))
        return super().attend(queries, keys, values, softmax)


def dense_logits(model: Model, ids: list[int], options: KVOptions) -> np.ndarray:
    """Every position's logits, one token at a time, so that each sees what was stored."""
    layers = lay_out(model.cache_specs, options, dtype=mx.float32, key_bias=False)
    cache = DenseCache(model)
    pairs = zip(layers, model.mixers, strict=True)
    cache.layers = {mixer: StoredKV(layer, mixer) for layer, mixer in pairs}
    return np.concatenate([np.array(cache.run(model, [("a", [i])])) for i in ids])


@given(
    case=st.sampled_from(["qwen3-v4", "gemma3_text-v4", "gpt_oss-v4", "llama-v5"]),
    bits=st.sampled_from(BITS),
    window=st.none() | st.integers(1, 60),
    sinks=st.sampled_from([0, 1, 4, 16, 20]),
    chunk=st.sampled_from([16, 32, 64, 256]),
    length=st.integers(1, 110),
)
@settings(max_examples=int(os.environ.get("MLXINFER_PROGRAMS", "4")))
def test_chunks_beside_others_equal_masked_attention(
    case: str,
    bits: tuple[int | None, int | None],
    window: int | None,
    sinks: int,
    chunk: int,
    length: int,
) -> None:
    model = tiny_model(case)
    options = KVOptions(bits=bits, window=window, sinks=sinks if window else 0)
    harness = Harness(model, kv=options, prefill_chunk=chunk, num_pages=40)
    ids = prompt(length)
    harness.add("other", prompt(40, seed=1), SamplingParams(max_tokens=20))
    harness.turn(2)
    ours = harness.logits(ids)
    expected = dense_logits(model, ids, options)
    off = np.abs(ours - expected) / max(1.0, expected.std())
    # A code may round the other way where two ways of adding up differ in the last bit; a wrong or
    # missing page would show as a mean of about 1.
    assert off.max() <= (1e-4 if bits == (None, None) else 0.3)
    assert off.mean() <= (1e-4 if bits == (None, None) else 0.02)


@pytest.mark.alike
@pytest.mark.parametrize("bits", BITS[::2])
def test_decode_equals_prefill(bits: tuple[int | None, int | None]) -> None:
    """The logits of a token are the same whether it came in a chunk or in a step."""
    model = tiny_model("gpt_oss-v4")  # learned sinks, windows, key biases
    options = KVOptions(bits=bits, window=30, sinks=4)
    stepped = Harness(model, kv=options)
    stepped_answer = stepped.run("a", prompt(5), SamplingParams(max_tokens=70, logprobs=3))
    whole = Harness(model, kv=options, prefill_chunk=256)
    logits = whole.logits(prompt(5) + stepped_answer.token_ids[:-1])[4:]
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for row, scores in zip(logprobs, stepped_answer.logprobs, strict=True):
        for token, logprob in scores.top:
            assert row[token] == pytest.approx(logprob, abs=1e-3 if bits[0] is None else 5e-2)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_formats_of_every_head_dim(dim: int, bits: int) -> None:
    vectors = mx.random.normal((3, 5, dim), key=mx.random.key(dim))
    stored = FORMATS[bits]
    parts = stored.encode(vectors)
    assert [(part.shape[-1], part.dtype) for part in parts] == stored.parts(dim, mx.float32)
    steps = (vectors.max() - vectors.min()).item() / (2**bits - 1)
    assert mx.abs(stored.decode(parts, mx.float32) - vectors).max().item() <= 0.51 * steps
    minimum = dim * bits / 8 + 4 * dim / group_size(dim)
    num_bytes = sum(width * kind.size for width, kind in stored.parts(dim, mx.float32))
    assert num_bytes <= 1.03 * minimum
    assert rotatable(dim)
    alone = stored.encode(vectors[1:2, 2:3])
    assert all(mx.array_equal(a[0, 0], p[1, 2]) for a, p in zip(alone, parts, strict=True))


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("case", ["gpt_oss-v4", "qwen2-v4"])
def test_keys_less_their_biases_give_the_scores_of_whole_keys(
    case: str, axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more closely in 4 bits. With M-RoPE a key turns by three positions."""
    rng, layer = np.random.default_rng(0), tiny_model(case).mixers[0]
    assert isinstance(layer, Attention)
    heads, dim = layer.spec.num_kv_heads, layer.spec.key_dim
    bias, rest, queries = (
        mx.array(rng.normal(size=(*first, heads, dim)).astype(np.float32))
        for first in ((), (5,), (5,))
    )
    monkeypatch.setattr(layer.args, "key_bias", 100 * bias)
    monkeypatch.setattr(layer, "spec", replace(layer.spec, rope_axes=axes))
    positions = mx.array([0, 1, 7, 100, 4000])
    if axes == 3:
        rope = RopeSpec(dims=dim, sections=(dim // 2 - 4, 2, 2))
        monkeypatch.setattr(layer.args, "rope", rope_of(rope, dim, mx.float32))
        positions = mx.stack([positions, positions + 900, positions + 31])
    places = mx.repeat(positions, heads, axis=-1), mx.tile(mx.arange(heads), 5)
    whole = mx.hadamard_transform(rest + layer.turned_bias(*places).reshape(5, heads, dim))
    queries = mx.hadamard_transform(queries) * dim**-0.5

    def off(decoded: mx.array) -> float:
        scores = (queries * decoded).sum(axis=-1), (queries * whole).sum(axis=-1)
        return float(mx.abs(scores[0] - scores[1]).max().item())

    four = FORMATS[4]
    [stored] = lay_out([layer.spec], KVOptions(bits=(4, 4)), dtype=mx.float32, key_bias=True)
    stored.take_from(layer)
    fmt = LessBias(4, num_heads=heads, num_axes=axes, layer=stored)
    assert off(fmt.decode(fmt.encode_at(whole, positions), mx.float32)) < 0.05 * off(
        four.decode(four.encode(whole), mx.float32)
    )


@pytest.mark.parametrize("value", [0.0, 3.25, -1000.0])
def test_constant_vectors_come_back_as_they_were(value: float) -> None:
    vectors = mx.full((2, 64), value)
    assert mx.array_equal(FORMATS[4].decode(FORMATS[4].encode(vectors), mx.float32), vectors)


@pytest.mark.parametrize(("bits", "per_number"), [((8, 8), 8.5), ((8, 4), 6.5), ((4, 4), 4.5)])
def test_pages_take_their_bytes(bits: tuple[int | None, int | None], per_number: float) -> None:
    specs = [KVSpec(2, 64, 64)] * 3
    cache = KVCache(
        lay_out(specs, KVOptions(bits=bits), dtype=mx.float32, key_bias=False),
        page_size=16,
        max_batch=2,
        prefill_chunk=64,
        budget_bytes=10**7,
    )
    assert cache.groups[0].page_bytes == 3 * 2 * 128 * 16 * per_number / 8
    assert sum(a.nbytes for layer in cache.paged for a in layer.arrays()) == cache.bytes_allocated


def laid_out(
    specs: list[KVSpec], *, key_bias: bool = False, **options: Any
) -> list[tuple[int | None, int, int, int]]:
    """Window, sinks, and bits of keys and values of each layer."""
    layers = lay_out(specs, KVOptions(**options), dtype=mx.float32, key_bias=key_bias)
    return [
        (layer.spec.window, layer.spec.sinks, *[fmt.bits for fmt in layer.formats])
        for layer in layers
    ]


@pytest.mark.parametrize(
    ("spec", "key_bias", "rotates"),
    [
        (KVSpec(2, 64, 64), False, True),
        (KVSpec(2, 80, 64), False, True),
        (KVSpec(2, 72, 64), False, False),  # no Hadamard matrix
        (KVSpec(2, 64, 64), True, False),  # a bias would be spread over all numbers
        (KVSpec(2, 64, 64, key_bias=True), True, False),
        (KVSpec(2, 64, 64, rope_dims=32), False, False),  # one vector is the key and its value
    ],
)
def test_8_bit_keys_are_rotated_where_possible(spec: KVSpec, key_bias: bool, rotates: bool) -> None:
    (layer,) = lay_out([spec], KVOptions(bits=(8, 8)), dtype=mx.float32, key_bias=key_bias)
    assert [fmt.rotates for fmt in layer.formats] == [rotates] * 2, "they share arrays"
    if not spec.rope_dims:
        vectors = mx.random.normal((3, 2, spec.key_dim), key=mx.random.key(0))
        assert mx.array_equal(layer.rotate(vectors), vectors).item() != rotates


@pytest.mark.parametrize(
    ("dim", "bits", "rotated"), [(64, 4, True), (64, 8, False), (80, 4, False)]
)
def test_values_of_4_bits_are_rotated_and_outputs_back(dim: int, bits: int, rotated: bool) -> None:
    options = KVOptions(bits=(8, bits))
    (layer,) = lay_out([KVSpec(2, dim, dim)], options, dtype=mx.float32, key_bias=False)
    assert isinstance(layer, KeyValueLayer)
    values = mx.random.normal((3, 2, dim), key=mx.random.key(0))
    stored = layer.rotate_values(values)
    assert mx.allclose(stored, values).item() != rotated
    assert mx.allclose(layer.restored(stored.flatten(1)), values.flatten(1), atol=1e-5).item()


def test_an_outlier_of_one_channel_costs_keys_of_8_bits_little() -> None:
    """Scores are as close as if the outlier were not there, which they are not in its own basis."""
    rng = np.random.default_rng(0)
    queries, keys = (mx.array(rng.normal(size=(64, 1, 64)).astype(np.float32)) for _ in range(2))
    keys[:, :, 5] = keys[:, :, 5] * 60
    queries[:, :, 5] = queries[:, :, 5] / 60

    def off(spec: KVSpec) -> float:
        options = KVOptions(bits=(8, 8))
        (layer,) = lay_out([spec], options, dtype=mx.float32, key_bias=False)
        assert isinstance(layer, KeyValueLayer)
        stored = layer.formats[0].decode(layer.encode(keys, keys)[0], mx.float32)[:, 0]
        scores = (layer.rotate(queries)[:, 0] * stored).sum(axis=-1)
        return mx.abs(scores - (queries * keys).sum(axis=-1)[:, 0]).mean().item()

    assert off(KVSpec(1, 64, 64)) < 0.6 * off(KVSpec(1, 64, 64, key_bias=True))


def test_kv_options_that_a_model_cannot_have_are_refused_with_the_reason() -> None:
    spec = [KVSpec(2, 64, 64)]
    told = [KVSpec(2, 64, 64, key_bias=True)]
    with pytest.raises(InvalidRequestError, match="biases"):
        laid_out(spec, bits=(4, 4), key_bias=True)
    assert laid_out(told, bits=(4, 4), key_bias=True) == [(None, 0, 4, 4)]
    assert laid_out(spec, bits=(8, 4), key_bias=True) == [(None, 0, 8, 4)]
    with pytest.raises(InvalidRequestError, match="rotates"):
        laid_out([KVSpec(2, 72, 64)], bits=(4, 4))
    with pytest.raises(InvalidRequestError, match="multiples of 8"):
        laid_out([KVSpec(2, 20, 20)], bits=(8, 8))
    with pytest.raises(InvalidRequestError, match="kv_bits is 5"):
        KVOptions.build(bits=5, window=None, sinks=0)
    with pytest.raises(InvalidRequestError, match="goes with kv_window"):
        KVOptions(sinks=4)
    with pytest.raises(InvalidRequestError, match="kv_window is 0"):
        KVOptions(window=0)


def test_a_models_own_windows_stand() -> None:
    specs = [KVSpec(2, 64, 64, window=8), KVSpec(2, 64, 64), KVSpec(2, 64, 64, window=900)]
    asked = laid_out(specs, window=100, sinks=4)
    assert asked == [(8, 0, 0, 0), (100, 4, 0, 0), (900, 0, 0, 0)]


def test_a_window_bounds_memory_however_long_the_answer() -> None:
    options = KVOptions(window=40, sinks=4, bits=(8, 8))
    harness = Harness(tiny_model("qwen3-v4"), kv=options, max_context=1000, prefill_chunk=32)
    harness.add("a", prompt(150), SamplingParams(max_tokens=90))
    most = 0
    while not harness.loop.idle:
        harness.turn()
        most = max(most, harness.loop.stats()["groups"][0]["pages_held"])
    assert most <= 1 + 3 + 1 + 2  # sinks, window, the page begun, the chunk in flight
