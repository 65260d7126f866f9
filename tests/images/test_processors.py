"""Pictures are prepared as transformers prepares them, and none is refused for its size."""

import hashlib
import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.runs import every
from PIL import Image

from mlxinfer.errors import CheckpointError
from mlxinfer.images import image_processor
from tests.images.cases import (
    ALL,
    FAMILIES,
    TOKENS,
    Case,
    numbers_of,
    picture,
    random_sizes,
    token_id,
)

DATA = Path(__file__).parents[1] / "data" / "images"
PIL_FAMILIES = [name for name in FAMILIES if name not in ("gemma4_unified", "lfm2_vl")]
# torchvision resizes in floats: it differs from Pillow by a level here and there, and by more where
# one side grows a hundredfold
SHARE_OF_TORCHVISION = 0.001


@cache
def references() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(DATA / "references.npz") as file:
        return dict(file)


def answered(name: str) -> list[tuple[int, int, int]]:
    """(index among the answered, height, width) of the sizes that transformers answers."""
    refused = references()[f"{name}.refused"]
    sizes = [size for size, no in zip(random_sizes(), refused, strict=True) if not no]
    return [(index, *size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_and_counts_of_500_pictures_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the sizes: the pixels are those of a flat colour."""
    processor = FAMILIES[name].processor
    grids, features = (references()[f"{name}.{what}"] for what in ("grids", "features"))
    monkeypatch.setattr(type(processor), "picture", lambda self, tiles, *_, **__: tiles)
    monkeypatch.setattr("mlxinfer.images.pixels.ColourScale.table", _flat)
    for module in ("qwen", "gemma", "own_size", "lfm2"):
        monkeypatch.setattr(f"mlxinfer.images.{module}.resized", _unfilled)
        for layout in ("colours_first", "colours_last"):
            monkeypatch.setattr(f"mlxinfer.images.{module}.{layout}", _no_rows, raising=False)
    for index, height, width in answered(name):
        tiles: Any = processor.prepare(_Sized(height, width), max_tokens=ALL)  # type: ignore[arg-type]
        assert [len(tiles), *tiles[-1].grid[1:]] == grids[index].tolist(), (height, width)
        assert sum(tile.num_features for tile in tiles) == features[index], (height, width)


class _Sized:
    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width


def _unfilled(image: object, size: tuple[int, int], resample: int) -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (*size, 3), (0, 0, 0))


def _no_rows(*_: object) -> None: ...


def _flat(self: object) -> None: ...


@pytest.mark.alike
@pytest.mark.parametrize("name", PIL_FAMILIES)
def test_pixels_are_those_of_the_pil_backend(name: str) -> None:
    case, known = FAMILIES[name], references()
    digests = known[f"{name}.digests"].reshape(-1, 8)
    some = [item for item in answered(name) if item[1] * item[2] < 600_000]
    for index, *size in random.Random(20261126).sample(some, 12):
        numbers = numbers_of(case.processor.prepare(picture(*size), max_tokens=ALL))
        levels = case.levels(numbers)
        assert hashlib.sha256(levels.tobytes()).digest()[:8] == digests[index].tobytes(), size
        sample = case.sample(numbers)
        np.testing.assert_allclose(sample, known[f"{name}.numbers"][index], rtol=0, atol=1e-6)


def test_the_verdict_on_all_pixels_is_that_they_are_equal() -> None:
    verdict = json.loads((DATA / "verdict.json").read_text())
    assert set(verdict) == set(FAMILIES)
    for name, value in verdict.items():
        assert value["sizes"] == 500
        if name in PIL_FAMILIES:
            assert value["largest_difference_of_levels"] == 0
            assert value["largest_difference_of_numbers"] <= 1e-6
        assert value["mean_share_of_levels_more_than_1_apart"] < SHARE_OF_TORCHVISION


@pytest.mark.alike
@pytest.mark.parametrize("name", every(2, FAMILIES))
def test_no_size_is_refused_and_no_limit_exceeded(name: str) -> None:
    processor, draw = FAMILIES[name].processor, random.Random(1)
    sizes = [(1, 1), (1, 5000), (5000, 1), (300, 200), (2000, 1500)]
    sizes += [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(3)]
    for limit, size in product([1, 7, 64, 800], sizes):
        picture = processor.prepare(Image.new("RGB", size[::-1]), max_tokens=limit)
        assert picture.num_features == picture.token_ids.count(picture.feature_id)
        for tile in picture.tiles:
            assert len(tile.patches) == np.prod(tile.grid)
            assert tile.num_features > 0
        assert picture.num_features <= limit or name == "gemma3", (limit, size)
        if picture.mrope_grid is not None:
            assert np.prod(picture.mrope_grid) == picture.num_features


def test_digests_tell_pixels_sizes_and_processors_apart() -> None:
    qwen, gemma = FAMILIES["qwen3_vl"].processor, FAMILIES["gemma4"].processor
    base = picture(100, 120)
    other = base.copy()
    other.putpixel((60, 50), (1, 2, 3))
    pictures = [
        qwen.prepare(base, max_tokens=ALL),
        qwen.prepare(other, max_tokens=ALL),
        qwen.prepare(base.resize((160, 75)), max_tokens=ALL),
        qwen.prepare(base.resize((640, 480)), max_tokens=ALL),
        qwen.prepare(base.resize((640, 480)), max_tokens=100),
        gemma.prepare(base, max_tokens=ALL),
    ]
    assert len({item.digest for item in pictures}) == len(pictures)
    assert all(len(item.digest) == 16 for item in pictures)
    assert qwen.prepare(base.copy(), max_tokens=ALL).digest == pictures[0].digest


def test_each_family_has_its_tokens_around_features() -> None:
    small = picture(96, 64)
    of = {name: case.processor.prepare(small, max_tokens=ALL) for name, case in FAMILIES.items()}
    assert of["qwen3_vl"].token_ids == (248056,) * of["qwen3_vl"].num_features
    assert of["gemma3"].token_ids == (255999, *[262144] * 256, 256000)
    assert of["gemma4"].token_ids[:2] == (255999, 258880)
    assert of["gemma4"].token_ids[-2:] == (258880, 258882)
    row = [10] * 4 + [12]
    assert of["pixtral"].token_ids == (*(row * 6)[:-1], 13)
    row = [10] * 3 + [12]
    assert of["mistral3"].token_ids == (*(row * 4)[:-1], 13)
    assert of["lfm2_vl"].token_ids[0] == TOKENS["<|image_start|>"]
    large = FAMILIES["lfm2_vl"].processor.prepare(picture(600, 1200), max_tokens=ALL)
    marks = [i for i in large.token_ids if i != 396]
    # two tiles beside each other, and a view of the whole
    assert marks == [498, 411, 412, 497, 499]
    plain = {"processor_config.json": {"use_image_special_tokens": False}}
    bare = Case(FAMILIES["lfm2_vl"].config, plain).processor
    large = bare.prepare(picture(600, 1200), max_tokens=ALL)
    assert large.token_ids == (396,) * large.num_features
    assert [tile.num_features for tile in large.tiles[:-1]] == [256, 256]


def test_spans_see_each_other_as_the_config_says() -> None:
    small = picture(9, 9)
    of = {
        name: case.processor.prepare(small, max_tokens=ALL).sees_itself
        for name, case in FAMILIES.items()
    }
    assert [name for name, sees in of.items() if sees] == ["gemma3", "gemma4", "gemma4_unified"]
    config = {**FAMILIES["gemma4"].config, "text_config": {"use_bidirectional_attention": None}}
    assert not Case(config).processor.sees_itself


def test_nested_files_win_and_missing_ones_leave_the_familys_numbers() -> None:
    assert FAMILIES["gemma4"].processor.max_features == 280  # type: ignore[attr-defined]
    flat = {"preprocessor_config.json": {"max_soft_tokens": 70}}
    case = Case(FAMILIES["gemma4"].config, flat)
    assert case.processor.max_features == 70  # type: ignore[attr-defined]
    bare = Case({**FAMILIES["qwen3_vl"].config}).processor
    assert (bare.low, bare.high, bare.scale.mean) == (  # type: ignore[attr-defined]
        65_536,
        16_777_216,
        (0.5,) * 3,
    )


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("preprocessor_config.json", "{", "cannot be read"),
        ("preprocessor_config.json", "[]", "expected a JSON object"),
        ("preprocessor_config.json", '{"resample": "soft"}', "resample"),
        ("preprocessor_config.json", '{"resample": 77}', "Pillow's filters"),
        ("preprocessor_config.json", '{"min_pixels": 0}', "min_pixels"),
        ("preprocessor_config.json", '{"image_mean": [0.5]}', "image_mean"),
        ("preprocessor_config.json", '{"image_std": [0.5, 0, 1]}', "image_std"),
        ("preprocessor_config.json", '{"rescale_factor": -1}', "rescale_factor"),
        ("config.json", '{"model_type": "qwen3_vl", "vision_config": {"a": 1}}', "image_token_id"),
    ],
)
def test_broken_files_are_an_error(file: str, text: str, said: str, tmp_path: Path) -> None:
    FAMILIES["qwen3_vl"].write(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        image_processor(tmp_path, token_id)


def test_models_without_a_tower_have_no_processor(tmp_path: Path) -> None:
    for config in ({"model_type": "qwen3"}, {"model_type": "gemma3", "text_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert image_processor(tmp_path, token_id) is None


CONFIG = {
    "model_type": "inkling2_loop",
    "image_token_id": 200_054,
    "vision_config": {"patch_size": 20, "spatial_merge_size": 2},
}


@pytest.fixture
def processor(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return image_processor(tmp_path, lambda text: None)


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(1, 1, 1, 1), (40, 80, 1, 2), (41, 79, 2, 2), (100, 333, 3, 9)],
)
def test_pixels_stay_and_a_border_fills_the_last_tokens(processor, height, width, rows, columns):
    image = picture(height, width)
    prepared = processor.prepare(image, max_tokens=ALL)
    (tile,) = prepared.tiles
    assert prepared.token_ids == (200_054,) * (rows * columns)
    assert tile.grid == (1, 2 * rows, 2 * columns)
    levels = np.full((40 * rows, 40 * columns, 3), -1.0)
    levels[:height, :width] = np.asarray(image)
    for index in range(4 * rows * columns):  # a patch has rows of pixels, colours last
        top, left = (20 * place for place in divmod(index, 2 * columns))
        wanted = (levels[top : top + 20, left : left + 20] / 255 - 0.5) / 0.5
        np.testing.assert_allclose(tile.patches[index], wanted.ravel(), atol=1e-6)


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_a_picture_with_too_many_tokens_is_made_smaller(processor, limit):
    for size in ((300, 200), (4000, 13), (2000, 1500)):
        prepared = processor.prepare(Image.new("RGB", size), max_tokens=limit)
        assert 0 < prepared.num_features <= limit
