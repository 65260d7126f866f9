"""Pictures of Inkling 2: of their own size, with a border up to whole tokens."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from .picture import Picture, Tile
from .pixels import ColourScale
from .processor import ImageProcessor
from .resize import shrink
from .settings import BICUBIC, HALF, VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image

_BORDER = -1.0  # the level of what is outside


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingProcessor(ImageProcessor):
    """Pictures in tokens of 40 x 40 pixels. Only one that has too many tokens is made smaller."""

    patch: int  # side of a patch in pixels
    merge: int  # patches along a side of what becomes one feature

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint; its config alone is enough."""
        mean, std = settings.normalisation(HALF)
        feature = settings.token("image_token_id", text="<|unused_200054|>")
        return cls(
            placeholder_id=feature,
            feature_id=feature,
            resample=settings.resample(BICUBIC),
            scale=ColourScale(settings.real("rescale_factor", 1 / 255), mean, std),
            patch=settings.tower_number("patch_size", 20),
            merge=settings.tower_number("spatial_merge_size", 2),
        )

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        side = self.patch * self.merge
        height, width = image.height, image.width
        if math.ceil(height / side) * math.ceil(width / side) > max_tokens:
            most = max_tokens * side * side
            height, width = shrink(height, width, factor=side, high=most, cap=most)
            image = image.resize((width, height), self.resample)
        rows, columns = math.ceil(height / side), math.ceil(width / side)
        levels = np.full((rows * side, columns * side, 3), _BORDER, np.float32)
        levels[:height, :width] = np.asarray(image)
        mean, std = np.array(self.scale.mean, np.float32), np.array(self.scale.std, np.float32)
        numbers = (levels * np.float32(self.scale.factor) - mean) / std
        grid = 1, rows * self.merge, columns * self.merge
        patches = numbers.reshape(grid[1], self.patch, grid[2], self.patch, 3).swapaxes(1, 2)
        tile = Tile(
            patches=np.ascontiguousarray(patches.reshape(grid[1] * grid[2], -1)),
            grid=grid,
            num_features=rows * columns,
        )
        return self.picture((tile,), (self.feature_id,) * (rows * columns))
