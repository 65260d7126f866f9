"""What makes a picture ready for one model: the interface of all families' processors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .picture import Picture, Tile
from .pixels import ColourScale, digest_of
from .settings import VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor(ABC):
    """The pictures of one model. A family's class reads its numbers off the checkpoint.

    Attributes:
        placeholder_id: the token that the chat template writes for one picture.
        feature_id: the token that stands for one feature in the prompt.
        resample: Pillow's number of the filter for resizing.
        scale: how levels of colours become numbers.
        sees_itself: the features of a picture see each other in the layers that say so.
    """

    placeholder_id: int
    feature_id: int
    resample: int
    scale: ColourScale
    sees_itself: bool = False

    @classmethod
    @abstractmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint; raises CheckpointError for broken files."""

    @abstractmethod
    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        """Make a picture ready for the model.

        Args:
            image: RGB, as `load_image` returns it. A large one is scaled down.
            max_tokens: features that it may have. A family with a fixed number of features has that
                number all the same.
        """

    @property
    def spelling(self) -> tuple[str, str]:
        """Text of the placeholder in a template, and what is encoded there; ("", ""): the same."""
        return "", ""

    def picture(
        self,
        tiles: tuple[Tile, ...],
        token_ids: tuple[int, ...],
        turns: tuple[int, int] | None = None,
    ) -> Picture:
        """The picture of these tiles and tokens; `turns` as of Picture."""
        return Picture(
            tiles=tiles,
            token_ids=token_ids,
            feature_id=self.feature_id,
            digest=digest_of(self, tiles),
            turns=turns,
            sees_itself=self.sees_itself,
        )
