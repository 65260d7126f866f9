"""Checkpoints of Qwen that see: names, layouts, quantised towers, none at all; memory."""

import json
from math import prod

import mlx.core as mx
import numpy as np
import pytest
from engine.pictures import run_tower
from engine.seeing_cases import own_prompt
from models.picture_cases import (
    ALL_PICTURE_CASES,
    DATA,
    QWEN_CASES,
    converted_names,
    picture_tensors,
    published_names,
)
from models.tiny import quantized, write

from mlxinfer.errors import CheckpointError, ModelError
from mlxinfer.images import Tile
from mlxinfer.layers.linear import QuantizedLinear
from mlxinfer.models import load
from mlxinfer.models.jsonfields import Fields
from mlxinfer.models.language import reachable
from mlxinfer.models.towers import parts
from mlxinfer.models.towers.loading import tower_builder, tower_name
from mlxinfer.models.towers.merged import MergedTower
from mlxinfer.models.weights.source import Checkpoint
from mlxinfer.models.weights.weights import Weights
from tests.bytes_taken import bytes_taken


def features(model, name: str) -> np.ndarray:
    result = [run_tower(model.tower, one.picture.tiles[0]) for one in own_prompt(name)[1]]
    return np.array(mx.concatenate([one.vectors for one in result]).astype(mx.float32))


@pytest.mark.alike
@pytest.mark.parametrize("name", QWEN_CASES)
@pytest.mark.parametrize("rename", [published_names, lambda tensors, _: converted_names(tensors)])
def test_names_and_layouts_of_others_give_the_same_model(tmp_path, name, rename):
    config, tensors = QWEN_CASES[name].config, picture_tensors(name)
    plain = load(write(tmp_path / "plain", config, tensors))
    other = load(write(tmp_path / "other", config, rename(tensors, name)))
    with np.load(DATA / f"{name}.npz") as reference:
        expected = reference["features"]
        assert np.abs(features(other, name) - expected).max() <= 1e-4 * max(1.0, expected.std())
    for ours, theirs in zip(plain.arrays(), other.arrays(), strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_a_quantised_tower_is_near_the_dense_one(tmp_path, name):
    how = {"group_size": 32, "bits": 8}
    config = {**QWEN_CASES[name].config, "quantization": how}
    arrays = {key: mx.array(value) for key, value in picture_tensors(name).items()}
    model = load(write(tmp_path, config, quantized(arrays, how)))
    packed = list(reachable([model.tower.merger], QuantizedLinear))
    assert len(packed) == 2  # 192 inputs; those of blocks are no whole groups
    with np.load(DATA / f"{name}.npz") as reference:
        error = np.abs(features(model, name) - reference["features"])
        assert error.max() < 0.05 * reference["features"].std()


def test_a_checkpoint_without_a_tower_reads_text(tmp_path):
    config, tensors = QWEN_CASES["qwen3_vl"].config, picture_tensors("qwen3_vl")
    text = {key: value for key, value in tensors.items() if "visual." not in key}
    model = load(write(tmp_path / "text", config, text))
    assert model.tower is None
    whole = load(write(tmp_path / "whole", config, tensors))
    more = sum(value.nbytes for key, value in tensors.items() if key not in text)
    assert whole.num_bytes == model.num_bytes + more
    some = {key: value for key, value in tensors.items() if "blocks.1.norm1" not in key}
    with pytest.raises(CheckpointError, match=r"sees pictures: .*blocks\.1\.norm1"):
        load(write(tmp_path / "some", config, some))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rope_scaling": None}, "mrope_section"),
        ({"num_heads": 5}, "5 heads of a hidden size of 48"),
        ({"deepstack_visual_indexes": [0, 9]}, "deepstack_visual_indexes"),
        ({"num_position_embeddings": 35}, "expected a square"),
        ({"depth": 5}, "blocks.4.*is missing"),
        ({"depth": 3}, "blocks.3"),
        ({"hidden_act": "gelu_9"}, "gelu_9"),
    ],
)
def test_wrong_configs_are_refused(tmp_path, change, match):
    name = "qwen3_vl"
    config = json.loads(json.dumps(QWEN_CASES[name].config))
    part = "text_config" if "rope_scaling" in change else "vision_config"
    config[part] |= change
    with pytest.raises(ModelError, match=match):
        load(write(tmp_path, config, picture_tensors(name)))


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_frames_of_a_tile_do_not_see_each_other(tmp_path, name):
    model = load(write(tmp_path, QWEN_CASES[name].config, picture_tensors(name)))
    patches = np.random.default_rng(2).standard_normal((3 * 80, 96)).astype(np.float32)
    clip = run_tower(model.tower, Tile(patches, (3, 8, 10), 60))
    frames = [
        run_tower(model.tower, Tile(patches[i : i + 80], (1, 8, 10), 20)) for i in range(0, 240, 80)
    ]
    for kind, whole in enumerate([clip.vectors, *clip.deep]):
        parts = mx.concatenate([[one.vectors, *one.deep][kind] for one in frames])
        assert mx.allclose(whole, parts, atol=1e-5)


def large(name: str, **sizes) -> MergedTower:
    """A tower with few numbers in each patch."""
    config = json.loads(json.dumps(QWEN_CASES[name].config))
    config["vision_config"] |= sizes
    fields = Fields(config, "config.json")
    tensors = {tower_name(key): value for key, value in picture_tensors(name).items()}
    hidden = sizes["hidden_size"]

    def cut(value: np.ndarray) -> mx.array:
        old = {48: hidden, 144: 3 * hidden, 192: 4 * hidden, 80: sizes["intermediate_size"]}
        return mx.array(value[tuple(slice(old.get(size, size)) for size in value.shape)])

    some = {
        key: cut(value)
        for key, value in tensors.items()
        if key is not None and not key.startswith(tuple(f"vision.blocks.{i}." for i in (1, 2, 3)))
    }
    weights = Weights(Checkpoint(some), dtype="float32")
    tower = tower_builder(fields)(fields, weights)
    mx.eval(tower.arrays())
    return tower


@pytest.mark.parametrize(
    ("name", "full"), [("qwen2_5_vl", []), pytest.param("qwen3_5", [0], marks=pytest.mark.slow)]
)
def test_a_large_picture_takes_its_activations_and_64_megabytes(name, full):
    """One head of 8 numbers, one block; scores of all patches would take a gigabyte."""
    sizes = {"hidden_size": 8, "num_heads": 1, "depth": 1, "intermediate_size": 16}
    tower = large(name, **sizes, fullatt_block_indexes=full)
    grid, hidden, inner = (1, 128, 128), 8, 16
    tile = Tile(np.ones((prod(grid), 96), np.float32), grid, prod(grid) // 4)
    _, peak, _ = bytes_taken(lambda: run_tower(tower, tile))
    activations = 4 * prod(grid) * (96 + 10 * hidden + 2 * inner)
    assert peak <= activations + (64 << 20)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "gemma4_dense"])
def test_a_pass_in_small_pieces_gives_the_same_features(tmp_path, monkeypatch, name):
    """One head and a few rows at a time, as large pictures are computed."""
    config = ALL_PICTURE_CASES[name].config
    tower = load(write(tmp_path, config, picture_tensors(name))).tower
    row = 768 if "gemma" in name else 96
    patches = np.random.default_rng(4).random((108, row)).astype(np.float32)
    tile = Tile(patches, (1, 6, 18), 0)
    whole, num_whole = run_tower(tower, tile), sum(1 for _ in tower.run(tile))
    monkeypatch.setattr(parts, "MAX_PRODUCTS", 1)
    monkeypatch.setattr(parts, "MAX_ROWS", 40)
    pieces = sum(1 for _ in tower.run(tile))
    kv_heads = config["vision_config"].get("num_key_value_heads", 3)
    assert pieces == num_whole + len(tower.blocks) * (kv_heads - 1 + 2)
    again = run_tower(tower, tile)
    for one, other in zip((whole.vectors, *whole.deep), (again.vectors, *again.deep), strict=True):
        assert mx.allclose(one, other, atol=1e-5)
