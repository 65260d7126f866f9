"""Qwen's families see as in transformers: features, logits in one shot, in chunks, in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import DenseCache
from models.picture_cases import BEGIN, DATA, IMAGE, QWEN_CASES, picture_tensors, pixels, prompt
from models.tiny import write

from mlxinfer.images import Picture, PlacedPicture, Tile, rope_positions
from mlxinfer.layers.step import Step, StepFeatures
from mlxinfer.models import load
from mlxinfer.models.towers import Features, Tower


def placed_pictures(name: str) -> list[PlacedPicture]:
    """The pictures of a case in its prompt."""
    case, pictures = QWEN_CASES[name], []
    for places, patches, tiles in zip(prompt(name)[1], pixels(name), case.pictures, strict=True):
        ((rows, columns),) = tiles
        tile = Tile(patches[0], (1, rows, columns), len(places))
        turns = rows // case.features[0], columns // case.features[1]
        one = Picture((tile,), (IMAGE,) * len(places), IMAGE, b"", turns=turns)
        pictures.append(PlacedPicture(one, places.start))
    return pictures


def seen(tower: Tower, tile: Tile) -> Features:
    """The features of a tile, evaluated slice by slice as the engine does it."""
    passing = tower.run(tile)
    while True:
        try:
            mx.eval(next(passing))
        except StopIteration as end:
            return end.value


@dataclass
class Prompt:
    """A prompt with pictures, and what their features are."""

    ids: list[int]
    pictures: Sequence[PlacedPicture]
    features: Sequence[Features]

    def part(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, list[mx.array]]:
        """Positions (3, n), rows (N,) with features among n, and these features of each kind."""
        rows, collected = [], []
        for (picture, first), features in zip(self.pictures, self.features, strict=True):
            low, high = max(first, start), min(first + picture.num_features, stop)
            if low < high:
                rows += range(low - start, high - start)
                parts = [features.vectors, *features.deep]
                collected.append([part[low - first : high - first] for part in parts])
        joined = [mx.concatenate(list(kind)) for kind in zip(*collected, strict=True)]
        return rope_positions(self.pictures, start, stop), np.array(rows, np.int32), joined


@pytest.fixture(scope="module", params=QWEN_CASES)
def case(request, tmp_path_factory):
    """A loaded model, its prompt, and the reference's features and logits."""
    name = request.param
    folder = tmp_path_factory.mktemp("case")
    model = load(write(folder, QWEN_CASES[name].config, picture_tensors(name)))
    pictures = placed_pictures(name)
    features = [seen(model.tower, one.picture.tiles[0]) for one in pictures]
    with np.load(DATA / f"{name}.npz") as reference:
        expected = reference["features"], reference["logits"]
    return model, Prompt(prompt(name)[0], pictures, features), expected


def run(model, cache: DenseCache, parts) -> np.ndarray:
    """Logits (T, vocab) of a step over (sequence, prompt, start, stop) in this order."""
    positions, rows, features, ids, first = [], [], [], [], 0
    for _, whole, start, stop in parts:
        turning, some, vectors = whole.part(start, stop)
        positions.append(turning)
        ids += whole.ids[start:stop]
        if len(some):
            rows.append(some + first)
            features.append(vectors)
        first += stop - start
    turning = np.concatenate(positions, axis=1)
    equal = (turning == turning[0]).all()
    segments = [(name, stop - start) for name, _, start, stop in parts]
    step = Step(mx.array(turning[0] if equal else turning), cache.step(segments))
    if features:
        vectors, *deep = [mx.concatenate(list(kind)) for kind in zip(*features, strict=True)]
        step.features = StepFeatures(mx.array(np.concatenate(rows)), vectors, tuple(deep))
    return np.array(model.logits(model(mx.array(ids, mx.int32), step)))


def assert_near(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 1e-4 * max(1.0, expected.std())


def test_features_equal_the_reference(case):
    model, whole, (expected, _) = case
    assert_near(np.array(mx.concatenate([one.vectors for one in whole.features])), expected)
    for one in whole.features:
        assert model.tower.width == (1 + len(one.deep)) * one.vectors.shape[1]


def test_logits_in_one_shot_equal_the_reference(case):
    model, whole, (_, expected) = case
    actual = run(model, DenseCache(model), [("a", whole, 0, len(whole.ids))])
    assert_near(actual, expected)
    assert model.rope_axes == 3


def test_logits_in_chunks_equal_the_reference(case):
    """Chunks end in text and inside of pictures; the last tokens come one by one."""
    model, whole, (_, expected) = case
    total = len(whole.ids)
    cuts = [0, 3, 9, *range(total - 4, total + 1)]
    cache = DenseCache(model)
    actual = [run(model, cache, [("a", whole, a, b)]) for a, b in pairwise(cuts)]
    assert_near(np.concatenate(actual), expected)


def test_logits_beside_text_equal_the_reference(case):
    """Two sequences with the pictures, at different places, and one of text between them."""
    model, whole, (_, expected) = case
    total = len(whole.ids)
    text = Prompt([5, 9, BEGIN, 7, 8, 4], [], [])
    alone = run(model, DenseCache(model), [("t", text, 0, 6)])
    cache = DenseCache(model)
    first = run(model, cache, [("a", whole, 0, 7), ("t", text, 0, 5), ("b", whole, 0, total - 1)])
    last = run(
        model, cache, [("b", whole, total - 1, total), ("t", text, 5, 6), ("a", whole, 7, total)]
    )
    assert_near(np.concatenate([first[:7], last[2:]]), expected)
    assert_near(np.concatenate([first[12:], last[:1]]), expected)
    assert_near(np.concatenate([first[7:12], last[1:2]]), alone)
