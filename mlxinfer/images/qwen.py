"""Pictures of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5 to 3.8."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .picture import Picture, Tile
from .pixels import ColourScale, Levels, colours_first, cut, resized
from .processor import ImageProcessor
from .resize import Size, fit_area
from .settings import BICUBIC, CLIP, HALF, VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenProcessor(ImageProcessor):
    """Pictures of any size and ratio, as squares of merged patches.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches along a side of what becomes one feature.
        frames: how often a still picture stands in a patch.
        low, high: pixels of a resized picture, at least and at most.
    """

    patch: int
    merge: int
    frames: int
    low: int
    high: int

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint."""
        second = settings.model_type.startswith(("qwen2_vl", "qwen2_5_vl"))
        mean, std = settings.normalisation(CLIP if second else HALF)
        low, high = (3_136, 1_003_520) if second else (65_536, 16_777_216)
        feature = settings.token("image_token_id", text="<|image_pad|>")
        return cls(
            placeholder_id=feature,
            feature_id=feature,
            resample=settings.resample(BICUBIC),
            scale=ColourScale(settings.real("rescale_factor", 1 / 255), mean, std),
            patch=settings.tower_number("patch_size", 14 if second else 16),
            merge=settings.tower_number("spatial_merge_size", settings.number("merge_size", 2)),
            frames=settings.tower_number("temporal_patch_size", 2),
            low=settings.number("min_pixels", settings.size("shortest_edge", low)),
            high=settings.number("max_pixels", settings.size("longest_edge", high)),
        )

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        """Make a picture ready: patches in the order in which they are merged."""
        tile = self.tile([self.blocks(image, self.fit(image, max_tokens))])
        ids = (self.feature_id,) * tile.num_features
        return self.picture((tile,), ids, turns=self.turns(tile))

    def fit(self, image: "Image", max_tokens: int, frames: int = 1, step: int = 1) -> Size:
        """The size of a picture, or of the frames of a video; arguments as of `fit_area`."""
        factor, height, width = self.patch * self.merge, image.height, image.width
        if frames > 1 and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return fit_area(
            height,
            width,
            factor=factor,
            low=self.low,
            high=self.high,
            cap=max_tokens * factor**2,
            frames=frames,
            step=step,
        )

    def blocks(self, image: "Image", size: Size) -> Levels:
        """Patches (rows, columns, merge, merge, side, side, 3) of features in rows and columns."""
        merge, patches = self.merge, cut(resized(image, size, self.resample), self.patch)
        rows, columns = patches.shape[0] // merge, patches.shape[1] // merge
        return patches.reshape(rows, merge, columns, merge, *patches.shape[2:]).swapaxes(1, 2)

    def tile(self, blocks: list[Levels]) -> Tile:
        """The tile of the blocks of up to `frames` frames. The last stands for missing ones."""
        rows, columns = blocks[0].shape[:2]
        blocks = blocks + blocks[-1:] * (self.frames - len(blocks))
        return Tile(
            patches=colours_first(blocks[0], self.scale, *blocks[1:]),
            grid=(1, rows * self.merge, columns * self.merge),
            num_features=rows * columns,
        )

    def turns(self, tile: Tile) -> tuple[int, int]:
        """Rows and columns of features."""
        return tile.grid[1] // self.merge, tile.grid[2] // self.merge
