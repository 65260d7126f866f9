"""Pictures of Inkling 2: whole tokens of 40 x 40 pixels around a picture that keeps its size."""

import json

import numpy as np
import pytest
from PIL import Image

from mlxinfer.images import image_processor
from tests.images.cases import ALL, picture

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
