"""Pictures of their own size: Pixtral and the Mistral 3 family, and Inkling 2."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from .picture import Picture, Tile
from .pixels import colours_first, cut, resized
from .processor import ImageProcessor
from .resize import fit_edge, shrink
from .settings import BICUBIC, CLIP, HALF, VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image

_BORDER = -1.0  # the level of what is outside, for Inkling 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralProcessor(ImageProcessor):
    """Pictures of any ratio. A row of features ends with a token, the last row with another.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches along a side of what becomes one feature.
        edge: pixels of the longer side, at most.
    """

    patch: int
    merge: int
    edge: int
    row_end_id: int
    end_id: int

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint; its config alone is enough."""
        feature = settings.token("image_token_index", "image_token_id", text="[IMG]")
        edge = settings.tower_number("image_size", 1024)
        merge = 2 if settings.model_type == "mistral3" else 1
        return cls(
            **cls.common(settings, feature, BICUBIC, CLIP),
            row_end_id=settings.token(text="[IMG_BREAK]"),
            end_id=settings.token(text="[IMG_END]"),
            patch=settings.tower_number("patch_size", 16),
            merge=settings.tower_number("spatial_merge_size", merge),
            edge=settings.size("longest_edge", edge),
        )

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        """Make a picture ready. `max_tokens` counts features, not the ends of rows."""
        side = self.patch * self.merge
        high = max_tokens * side**2
        size = fit_edge(image.height, image.width, edge=self.edge, factor=side, high=high)
        patches = cut(resized(image, size, self.resample), self.patch)
        rows, columns = size[0] // side, size[1] // side
        tile = Tile(
            patches=colours_first(patches, self.scale),
            grid=(1, *patches.shape[:2]),
            num_features=rows * columns,
        )
        row = (*(self.feature_id,) * columns, self.row_end_id)
        return self.picture((tile,), (*(row * rows)[:-1], self.end_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingProcessor(ImageProcessor):
    """Pictures in tokens of 40 x 40 pixels, with a border up to whole tokens.

    Only a picture that has too many tokens is made smaller.
    """

    patch: int  # side of a patch in pixels
    merge: int  # patches along a side of what becomes one feature

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint; its config alone is enough."""
        feature = settings.token("image_token_id", text="<|unused_200054|>")
        return cls(
            **cls.common(settings, feature, BICUBIC, HALF),
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
