"""Processors as published checkpoints have them, and pictures of many sizes to try them with."""

import json
import random
import tempfile
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from mlxinfer.images import ImageProcessor, Picture, image_processor

SEED = 20261126
EXTREMES = (
    *((1, 4000), (4000, 1), (1, 1), (4000, 6000), (13, 2500), (2500, 13), (1, 400), (20, 20)),
    *((10, 10_000), (2174, 1356), (1356, 2174), (201, 1), (200, 1), (3, 599), (512, 512)),
    *((724, 724), (725, 725), (1540, 1540), (1541, 1540), (896, 896), (2000, 400), (48, 48)),
)
TOKENS = {
    "<|image_start|>": 498, "<|image_end|>": 499, "<|img_thumbnail|>": 497, "[IMG_BREAK]": 12,
    "[IMG_END]": 13,
}  # fmt: skip
ALL = 10**6  # of tokens: no limit but the checkpoint's own


def token_id(text: str) -> int | None:
    """The id of a token that marks pictures."""
    if text.startswith("<|img_row_"):
        row, column = (int(item) for item in text.strip("<|>").split("_")[2::2])
        return 400 + 10 * row + column
    return TOKENS.get(text)


def picture(height: int, width: int) -> Image.Image:
    """A picture of noise and of a slope, the same for the same size."""
    noise = _noise()
    levels = np.resize(noise, (height, width, 3))
    slope = np.linspace(0, 255, width).astype(np.uint8)[None, :, None]
    return Image.fromarray(np.where(levels > 100, levels, slope).astype(np.uint8))


@cache
def _noise() -> NDArray[np.uint8]:
    return np.random.default_rng(SEED).integers(0, 256, (251, 257, 3), np.uint8)


def random_sizes(count: int = 500) -> list[tuple[int, int]]:
    """(height, width) from 1 x 1 to 24 megapixels."""
    draw = random.Random(SEED)
    sizes = list(EXTREMES)
    while len(sizes) < count:
        height = round(2 ** draw.uniform(0, 10.5))
        ratio = 2 ** draw.uniform(-3, 3) if draw.random() < 0.8 else 2 ** draw.uniform(-7, 7)
        sizes.append((height, max(1, min(3000, round(height * ratio)))))
    return sizes


@dataclass(frozen=True)
class Case:
    """A family as a published checkpoint sets it up."""

    config: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    transformers: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return random_sizes()

    def write(self, folder: Path) -> Path:
        for name, content in {"config.json": self.config, **self.files}.items():
            (folder / name).write_text(json.dumps(content))
        return folder

    @cached_property
    def processor(self) -> ImageProcessor:
        with tempfile.TemporaryDirectory() as folder:
            processor = image_processor(self.write(Path(folder)), token_id)
        assert processor is not None
        return processor

    def levels(self, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The levels that gave the numbers of rows, which are much further apart than 1e-6."""
        scale = self.processor.scale
        first = self.config["model_type"] not in ("gemma4", "gemma4_unified", "lfm2_vl")
        rows = numbers.reshape(len(numbers), *((3, -1) if first else (-1, 3)))
        shape = (3, 1) if first else (3,)
        mean, std = (np.array(item).reshape(shape) for item in (scale.mean, scale.std))
        return np.rint((rows * std + mean) / scale.factor).clip(0, 255).astype(np.uint8)

    def sample(self, numbers: NDArray[np.float32]) -> list[float]:
        """Four of the final numbers, at places that depend on how many there are."""
        flat = numbers.reshape(-1)
        return [float(flat[int(part * (flat.size - 1))]) for part in (0.1, 0.37, 0.71, 0.93)]


def numbers_of(picture: Picture) -> NDArray[np.float32]:
    """The rows of all tiles."""
    return np.concatenate([tile.patches for tile in picture.tiles])


_TABLE = yaml.load(Path(__file__).with_name("families.yml").read_text(), yaml.CSafeLoader)
FAMILIES = {name: Case(**fields) for name, fields in _TABLE.items()}
