"""Towers give the features of transformers, and models with pictures in their prompt its logits."""

from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import DenseCache
from models.picture_cases import (
    DATA,
    PICTURE_CASES,
    older_names,
    picture_tensors,
    pixels,
    prompt,
)
from models.tiny import write

from mlxinfer.images import Tile
from mlxinfer.models import load


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
            for one, grid in zip(parts, grids, strict=True)
        ]
        for parts, grids in zip(pixels(name), case.pictures, strict=True)
    ]


def checkpoint(folder: Path, name: str, *, older: bool = False) -> Path:
    """The folder of a case's checkpoint, with transformers' names or those of published ones."""
    config, tensors = PICTURE_CASES[name].config, picture_tensors(name)
    if older:
        tensors = older_names(tensors, config["model_type"])
    return write(folder, config, tensors)


def features(tower, tile: Tile) -> mx.array:
    """The whole pass."""
    steps = tower.run(tile)
    while True:
        try:
            mx.eval(next(steps))
        except StopIteration as ended:
            return ended.value.vectors


def assert_close(ours: np.ndarray, reference: np.ndarray) -> None:
    assert ours.shape == reference.shape
    assert np.abs(ours - reference).max() <= 1e-4 * max(1.0, reference.std())


@pytest.fixture(scope="module", params=PICTURE_CASES)
def seeing(request, tmp_path_factory):
    """A model, its prompt, the features that stand in it from some places on, and the logits."""
    name = request.param
    model = load(checkpoint(tmp_path_factory.mktemp("case"), name))
    ids, places = prompt(name)
    pictures = [
        (place.start, mx.concatenate([features(model.tower, tile) for tile in parts]))
        for place, parts in zip(places, tiles(name), strict=True)
    ]
    with np.load(DATA / f"{name}.npz") as reference:
        return model, ids, pictures, reference["logits"]


@pytest.mark.parametrize("older", [False, True], ids=["new names", "published names"])
@pytest.mark.parametrize("name", PICTURE_CASES)
def test_features_equal_the_reference(name, older, tmp_path):
    model = load(checkpoint(tmp_path, name, older=older))
    found = [features(model.tower, tile) for parts in tiles(name) for tile in parts]
    with np.load(DATA / f"{name}.npz") as reference:
        assert_close(np.array(mx.concatenate(found)), reference["features"])


def test_logits_equal_the_reference(seeing):
    model, ids, pictures, reference = seeing
    cache = DenseCache(model)
    cache.see("a", pictures)
    assert_close(np.array(cache.run(model, [("a", ids)])), reference)


def test_chunks_beside_text_give_the_reference(seeing):
    """Chunks end everywhere but inside of a picture."""
    model, ids, pictures, reference = seeing
    cache, found, text = DenseCache(model), [], [7, 8, 9]
    cache.see("a", pictures)
    stops = {place + extra for place, whole in pictures for extra in (0, len(whole))}
    stops = sorted({1, len(ids) - 1, len(ids), *stops})
    for start, stop in pairwise([0, *stops]):
        both = cache.run(model, [("b", text), ("a", ids[start:stop])])
        found.append(both[len(text) :])
    assert_close(np.array(mx.concatenate(found)), reference)
