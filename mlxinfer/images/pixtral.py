"""Pictures of Pixtral and of the Mistral 3 family: rows of tokens that end with a token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .picture import Picture, Tile
from .pixels import ColourScale, colours_first, cut, resized
from .processor import ImageProcessor
from .resize import fit_edge
from .settings import BICUBIC, CLIP, VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image


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
        mean, std = settings.normalisation(CLIP)
        feature = settings.token("image_token_index", "image_token_id", text="[IMG]")
        edge = settings.tower_number("image_size", 1024)
        merge = 2 if settings.model_type == "mistral3" else 1
        return cls(
            placeholder_id=feature,
            feature_id=feature,
            row_end_id=settings.token(text="[IMG_BREAK]"),
            end_id=settings.token(text="[IMG_END]"),
            resample=settings.resample(BICUBIC),
            scale=ColourScale(settings.real("rescale_factor", 1 / 255), mean, std),
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
