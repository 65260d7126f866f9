"""Pictures of Gemma 3: always squares of one size, and always as many tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .picture import Picture, Tile
from .pixels import ColourScale, colours_first, cut, resized
from .processor import ImageProcessor
from .settings import BILINEAR, HALF, VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Processor(ImageProcessor):
    """Pictures squeezed into a square. Crops of wide pictures ("pan and scan") are not made.

    Attributes:
        side: of the square in pixels.
        patch: side of a patch in pixels.
        num_features: of each picture.
        end_id: the token behind the features.
    """

    side: int
    patch: int
    num_features: int
    end_id: int

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint."""
        mean, std = settings.normalisation(HALF)
        return cls(
            placeholder_id=settings.token("boi_token_index", "boi_token_id", default=255_999),
            feature_id=settings.token("image_token_index", "image_token_id", default=262_144),
            end_id=settings.token("eoi_token_index", "eoi_token_id", default=256_000),
            resample=settings.resample(BILINEAR),
            scale=ColourScale(settings.real("rescale_factor", 1 / 255), mean, std),
            side=settings.tower_number("image_size", settings.size("height", 896)),
            patch=settings.tower_number("patch_size", 14),
            num_features=settings.tower_number("mm_tokens_per_image", 256),
            sees_itself=True,
        )

    @property
    def spelling(self) -> tuple[str, str]:
        """Empty lines stand around a picture; they become tokens together with the text beside."""
        return "<start_of_image>", "\n\n<start_of_image>\n\n"

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        """Make a picture ready; `max_tokens` changes nothing."""
        patches = cut(resized(image, (self.side, self.side), self.resample), self.patch)
        tile = Tile(
            patches=colours_first(patches, self.scale),
            grid=(1, *patches.shape[:2]),
            num_features=self.num_features,
        )
        features = (self.feature_id,) * self.num_features
        return self.picture((tile,), (self.placeholder_id, *features, self.end_id))
