"""Vectors and scores are those of transformers and sentence-transformers, in passes of any size."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.tiny import arrays_in
from pooling.cases import CASES
from pooling.tiny_pooling import pooling_folder, reference

from mlxinfer.core import TokenEvent
from mlxinfer.errors import CheckpointError, InvalidRequestError
from mlxinfer.metal_kernels.paged_attention import Softmax
from mlxinfer.pooling.config import read_pooling
from mlxinfer.pooling.loop import PoolingLoop
from mlxinfer.pooling.model import PoolingModel, load_pooling
from mlxinfer.pooling.request import PoolingRequest, TokenRow
from mlxinfer.pooling.segments import Masks, SegmentAttention, row_groups


def model_in(folder: Path) -> PoolingModel:
    pooling = read_pooling(folder)
    assert pooling is not None
    return load_pooling(folder, replace(pooling, activation="identity"))


def results(model: PoolingModel, rows: list[TokenRow], pass_tokens: int | None) -> np.ndarray:
    """Of one request, by a loop without a thread."""
    events: list[TokenEvent] = []
    loop = PoolingLoop(model, events.extend, max_context=40, pass_tokens=pass_tokens)
    request = PoolingRequest("a", rows)
    loop.limits.check(request)
    loop.add(request, None)
    while not loop.idle:
        loop.turn()
    (event,) = events
    assert event.error is None, event.error
    return event.pooled


def rows_of(name: str) -> tuple[list[TokenRow], np.ndarray]:
    ids, types, expected = reference(name)
    paired = any(map(any, types))
    return [
        TokenRow(row, kind if paired else None) for row, kind in zip(ids, types, strict=True)
    ], expected


def close(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= 1e-4 * max(1.0, expected.std())
    assert expected.std() > 0.01, "a trivial case"


@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_reference(name, tmp_path):
    model, (rows, expected) = model_in(pooling_folder(tmp_path, name)), rows_of(name)
    close(results(model, rows, None), expected)
    close(results(model, rows, 10), expected)  # rows of 17 and 30 tokens go in slices of layers


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3", "xlm-roberta-scores"])
def test_layers_of_the_gpu_equal_the_reference(name, tmp_path, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    model, (rows, expected) = model_in(pooling_folder(tmp_path, name)), rows_of(name)
    close(results(model, rows, None), expected)


def test_attention_in_blocks_equals_the_reference(tmp_path, monkeypatch):
    """Long rows attend in blocks of queries, over the keys that their windows reach."""
    monkeypatch.setattr("mlxinfer.pooling.segments.QUERY_BLOCK", 4)
    monkeypatch.setattr("mlxinfer.pooling.segments.MAX_SCORES", 64)
    for name in ("modernbert", "gemma3", "qwen3"):
        model = model_in(pooling_folder(tmp_path / name, name))
        rows, expected = rows_of(name)
        close(results(model, rows, None), expected)


def test_nomic_under_names_and_keys_of_the_hub_and_of_transformers(tmp_path):
    nomic = {  # names on the hub, and transformers' own
        "encoder.layers": "layers",
        "attn.out_proj": "self_attn.o_proj",
        "fc11": "up_proj",
        "fc12": "gate_proj",
        "fc2": "down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
        "emb_ln": "embeddings.LayerNorm",
    }
    rows, expected = rows_of("nomic_bert")
    folder = pooling_folder(tmp_path, "nomic_bert")
    config = {
        "model_type": "nomic_bert",
        "vocab_size": 96,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 80,
        "n_positions": 64,
        "type_vocab_size": 2,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
        "qkv_proj_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    close(results(model_in(folder), rows, None), expected)
    arrays = {}
    for name, array in arrays_in(folder).items():
        for hub, ours in nomic.items():
            name = name.replace(hub, ours)
        if "Wqkv" not in name:
            arrays[name] = array
            continue
        for letter, part in zip("qkv", mx.split(array, 3), strict=True):
            arrays[name.replace("attn.Wqkv", f"self_attn.{letter}_proj")] = part
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    close(results(model_in(folder), rows, None), expected)


@pytest.mark.parametrize("name", ["bert-scores", "modernbert", "qwen3-scores", "gemma3"])
def test_quantised_weights_stay_close(name, tmp_path):
    how = {"group_size": 32, "bits": 8}
    folder = pooling_folder(tmp_path, name, quantize=how)
    rows, expected = rows_of(name)
    ours = results(model_in(folder), rows, None)
    assert np.abs(ours - expected).max() <= 0.1 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "tensor", "rows"),
    [
        ("bert", "embeddings.position_embeddings.weight", (39, 41, None)),
        ("bert", "embeddings.token_type_embeddings.weight", (1, 3, None)),
        ("xlm-roberta-scores", "roberta.embeddings.position_embeddings.weight", (39, None)),
        ("distilbert", "embeddings.position_embeddings.weight", (39, None)),
        ("nomic_bert", "embeddings.token_type_embeddings.weight", (1, None)),
    ],
)
def test_tables_of_a_wrong_size_are_refused_by_name(name, tensor, rows, tmp_path):
    """A shorter one than the config says would be read behind its end."""
    for number in rows:
        folder = pooling_folder(tmp_path / str(number), name)
        arrays = arrays_in(folder)
        stored = next(key for key in arrays if tensor.endswith(key) or key.endswith(tensor))
        table = arrays.pop(stored)
        if number is not None:
            arrays[stored] = mx.zeros((number, table.shape[1]))
        mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        with pytest.raises(CheckpointError, match="_embeddings"):
            model_in(folder)


def test_token_types_that_there_are_not_are_refused(tmp_path):
    limits = PoolingLoop(model_in(pooling_folder(tmp_path, "bert")), print, max_context=9).limits
    limits.check(PoolingRequest("a", [TokenRow([5, 6], [0, 1])]))
    with pytest.raises(InvalidRequestError, match="input 1 has tokens of type 2"):
        limits.check(PoolingRequest("a", [TokenRow([5]), TokenRow([5, 6], [0, 2])]))


def test_a_table_of_one_token_type_serves_pairs(tmp_path):
    """Nothing behind the table is read where a tokenizer says that the second text is of type 1."""
    model = model_in(pooling_folder(tmp_path, "xlm-roberta-scores"))
    rows, expected = rows_of("xlm-roberta-scores")
    typed = [replace(row, token_types=[0] + [1] * (len(row.ids) - 1)) for row in rows]
    close(results(model, typed, None), expected)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_causal_masks_are_no_arrays(soft_cap, monkeypatch):
    """In blocks too, and where scores are capped."""
    assert Masks(False).of((0, 32_768), (0, 32_768), None) == "causal"
    monkeypatch.setattr("mlxinfer.pooling.segments.QUERY_BLOCK", 4)
    monkeypatch.setattr("mlxinfer.pooling.segments.MAX_SCORES", 64)
    length, heads, dim = 11, 4, 8
    queries, keys, values = (
        mx.random.normal((length, count, dim), key=mx.random.key(seed))
        for seed, count in enumerate((heads, 2, 2))
    )
    attention = SegmentAttention(row_groups([length]), Masks(False), None)
    actual = np.array(attention.attend(queries, keys, values, Softmax(0.5, soft_cap=soft_cap)))
    q, k, v = (np.array(x).repeat(heads // x.shape[1], 1) for x in (queries, keys, values))
    scores = np.einsum("qhd,khd->hqk", q, k) * 0.5
    scores = scores if soft_cap is None else np.tanh(scores / soft_cap) * soft_cap
    weights = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
