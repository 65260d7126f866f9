"""Towers give the features of transformers. Logits: `engine/test_picture_parity.py`."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.pictures import run_tower
from models.picture_cases import DATA, PICTURE_CASES, older_names, picture_tensors, pixels
from models.runs import every
from models.tiny import write

from mlxinfer.errors import PictureError
from mlxinfer.images import Tile
from mlxinfer.layers.norm import LayerNorm
from mlxinfer.models import load
from mlxinfer.models.jsonfields import Fields
from mlxinfer.models.towers import parts
from mlxinfer.models.towers.gemma4 import PixelNorm
from mlxinfer.models.towers.loading import tower_builder
from mlxinfer.models.towers.parts import full_attention
from tests.bytes_taken import bytes_taken


def channels_last(patches: np.ndarray) -> np.ndarray:
    """(P, C * p * p) -> (P, p * p * C)."""
    side = int((patches.shape[1] // 3) ** 0.5)
    return patches.reshape(-1, 3, side, side).transpose(0, 2, 3, 1).reshape(len(patches), -1)


def tiles(name: str) -> list[list[Tile]]:
    """Of each picture of a case, in the order that its tower reads."""
    case = PICTURE_CASES[name]
    first = case.config["model_type"] in ("llava", "mistral3", "gemma3")
    return [
        [
            Tile(one if first else channels_last(one), (1, *grid), case.num_features(grid))
            for one, grid in zip(pieces, grids, strict=True)
        ]
        for pieces, grids in zip(pixels(name), case.pictures, strict=True)
    ]


def checkpoint(folder: Path, name: str, *, older: bool = False) -> Path:
    """The folder of a case's checkpoint, with transformers' names or those of published ones."""
    config, tensors = PICTURE_CASES[name].config, picture_tensors(name)
    if older:
        tensors = older_names(tensors, config["model_type"])
    return write(folder, config, tensors)


def features(tower, tile: Tile) -> mx.array:
    return run_tower(tower, tile).vectors


def assert_close(ours: np.ndarray, reference: np.ndarray) -> None:
    assert ours.shape == reference.shape
    assert np.abs(ours - reference).max() <= 1e-4 * max(1.0, reference.std())


@pytest.mark.alike
@pytest.mark.parametrize("older", [False, True], ids=["new names", "published names"])
@pytest.mark.parametrize("name", PICTURE_CASES)
def test_features_equal_the_reference(name, older, tmp_path):
    model = load(checkpoint(tmp_path, name, older=older))
    actual = [features(model.tower, tile) for pieces in tiles(name) for tile in pieces]
    with np.load(DATA / f"{name}.npz") as reference:
        assert_close(np.array(mx.concatenate(actual)), reference["features"])


@pytest.mark.alike
@pytest.mark.parametrize("name", PICTURE_CASES)
def test_16_bits_stay_16_bits(name, tmp_path):
    """Nothing widens the states of patches, and the features are near those of 32 bits."""
    tower = load(checkpoint(tmp_path, name), dtype="bfloat16").tower
    tile = tiles(name)[0][0]
    assert {piece.dtype for piece in tower.run(tile)} <= {mx.bfloat16}
    actual = features(tower, tile)
    assert actual.dtype == mx.bfloat16
    with np.load(DATA / f"{name}.npz") as reference:
        expected = reference["features"][: len(actual)]
    error = np.abs(np.array(actual.astype(mx.float32)) - expected).mean()
    assert error < 0.02 * expected.std()


@pytest.mark.parametrize(("name", "grid"), [("gemma4_e", (3, 66)), ("gemma4_unified", (25, 1))])
def test_a_picture_beyond_the_table_of_places_is_refused(name, grid, tmp_path):
    """What lies behind a table would be read."""
    tower = load(checkpoint(tmp_path, name)).tower
    patches = np.zeros((grid[0] * grid[1], PICTURE_CASES[name].patch), np.float32)
    tile = Tile(patches, (1, *grid), PICTURE_CASES[name].num_features(grid))
    with pytest.raises(PictureError, match=f"{max(grid)} patches in a row or a column"):
        features(tower, tile)


@pytest.mark.parametrize("side", [16, 48])
@pytest.mark.parametrize(("bright", "spread"), [(0.5, 0.3), (0.9, 0.03), (0.99, 0.003), (1, 1e-4)])
def test_flat_squares_are_normed_as_exactly_as_others(side, bright, spread):
    """Against float64: sky and paper, of which all numbers are close to a bright mean."""
    rng = np.random.default_rng(side)
    dims = 3 * side * side
    pixels = (bright + spread * rng.normal(size=(40, dims))).clip(0, 1).astype(np.float32)
    weight, bias = rng.normal(size=(2, dims)).astype(np.float32)
    norm = PixelNorm(LayerNorm(mx.array(weight), 1e-5, mx.array(bias)))
    wide = pixels.astype(np.float64)
    wide -= wide.mean(1, keepdims=True)
    wide /= np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.array(norm(mx.array(pixels))), wide * weight + bias, atol=2e-5)


def test_blocks_of_queries_change_nothing(monkeypatch):
    """As whole scores: with more heads of queries than of keys, and a last block that is short."""
    rng = np.random.default_rng(3)
    queries, keys, values = (
        mx.array(rng.standard_normal((heads, 75, 8), np.float32)) for heads in (4, 2, 2)
    )
    whole = full_attention(queries, keys, values, 0.3)
    monkeypatch.setattr(parts, "MAX_SCORES", 75 * 20)
    blocks = full_attention(queries, keys, values, 0.3)
    np.testing.assert_allclose(np.array(blocks), np.array(whole), atol=1e-6)


@pytest.mark.parametrize("dim", [64, 104, 144])
def test_heads_of_any_size_give_the_same_on_metal(dim, monkeypatch):
    """Where MLX's attention takes no such heads, zeros stand behind them; wide ones are blocked."""
    rng = np.random.default_rng(4)
    queries, keys, values = (
        mx.array(rng.standard_normal((2, 30, dim), np.float32)) for _ in range(3)
    )
    scores = 0.1 * (queries @ keys.swapaxes(1, 2))
    expected = mx.softmax(scores, axis=-1) @ values
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(parts, "MAX_SCORES", 30 * 7)
    taken = []
    plain = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *given, scale: taken.append(given[0].shape) or plain(*given, scale=scale),
    )
    actual = full_attention(queries, keys, values, 0.1)
    np.testing.assert_allclose(np.array(actual), np.array(expected), atol=1e-5)
    assert taken[0] == {64: (1, 2, 30, 64), 104: (1, 2, 30, 128), 144: (1, 1, 7, 144)}[dim]


@pytest.mark.parametrize("name", every(3, ["gemma4_e", "lfm2_vl", "mistral3"]))
def test_a_pass_needs_no_array_of_patches_by_patches(name, tmp_path):
    """One block at 3,600 patches: scores of all heads would be 155 MB and more."""
    config = json.loads(json.dumps(PICTURE_CASES[name].config))
    config["vision_config"]["num_hidden_layers"] = 1
    config["vision_config"]["position_embedding_size"] = 60
    config.pop("vision_feature_layer", None)
    tensors = {key: one for key, one in picture_tensors(name).items() if is_kept(key)}
    if (table := f"{TOWER}patch_embedder.position_embedding_table") in tensors:
        tensors[table] = tensors[table][:, :60]
    tower = load(write(tmp_path, config, tensors)).tower
    case, grid = PICTURE_CASES[name], (60, 60)
    patches = np.random.default_rng(0).random((60 * 60, case.patch), np.float32)
    tile = Tile(patches, (1, *grid), case.num_features(grid))
    _, peak, _ = bytes_taken(lambda: features(tower, tile))
    # A copy of the patches in their own dtype, ten states of each patch, and 64 MB.
    allowed = 2 * patches.nbytes + 10 * len(patches) * 80 * 4 + (64 << 20)
    assert peak < allowed


TOWER = "model.vision_tower."


def is_kept(name: str) -> bool:
    """Whether a tensor is in no block of the tower but the first."""
    return not re.search(r"vision_tower\.(encoder|transformer)\.layers\.[12]\.", name)


HOW = {"group_size": 16, "bits": 4, "mode": "nvfp4"}  # the one format for rows of 48 numbers


def mlx_layout(tensors: dict[str, np.ndarray]) -> dict[str, mx.array]:
    """As conversions for MLX have them: convolutions with channels last, matrices of few bits."""
    by_name: dict[str, mx.array] = {}
    for name, value in tensors.items():
        array = mx.array(value)
        if array.ndim == 4:
            array = mx.contiguous(array.transpose(0, 2, 3, 1))
        if array.ndim != 2 or not name.endswith(".weight") or array.shape[1] % 16:
            by_name[name] = array
            continue
        names = name, f"{name.removesuffix('weight')}scales"
        by_name |= dict(zip(names, mx.quantize(array, **HOW), strict=True))
    return by_name


@pytest.mark.alike
@pytest.mark.parametrize("name", PICTURE_CASES)
def test_a_conversion_for_mlx_loads(name, tmp_path):
    """Features of quantised matrices are like those of the checkpoint."""
    config, tensors = PICTURE_CASES[name].config, picture_tensors(name)
    named = older_names(tensors, config["model_type"])
    model = load(write(tmp_path, {**config, "quantization": HOW}, mlx_layout(named)))
    actual = [features(model.tower, tile) for pieces in tiles(name) for tile in pieces]
    with np.load(DATA / f"{name}.npz") as reference:
        expected = reference["features"]
    both = np.array(mx.concatenate(actual)).flatten(), expected.flatten()
    assert np.corrcoef(*both)[0, 1] > 0.95


@pytest.mark.parametrize(
    ("outer", "inner"), [("llava", "clip_vision_model"), ("aya_vision", "pixtral"), ("llava", None)]
)
def test_a_tower_that_is_not_known_is_left_out(outer, inner):
    config = PICTURE_CASES["pixtral"].config
    vision = {**config["vision_config"], "model_type": inner}
    family = tower_builder(Fields({**config, "model_type": outer, "vision_config": vision}, "it"))
    assert family is None
    assert tower_builder(Fields(config, "it")) is not None
