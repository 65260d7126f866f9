"""The interface of all families' processors. A processor makes a picture ready for one model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from .picture import Picture, Shown, Tile
from .pixels import ColourScale, digest_of
from .settings import Normalisation, VisionSettings
from .video import Video

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor(ABC):
    """The pictures of one model. A family's class reads its numbers off the checkpoint."""

    placeholder_id: int  # the token that the chat template writes for one picture
    feature_id: int  # the token that stands for one feature in the prompt
    resample: int  # Pillow's number of the filter for resizing
    scale: ColourScale  # how levels of colours become numbers
    sees_itself: bool = False  # the features of a picture see each other in the layers that say so

    @classmethod
    @abstractmethod
    def read(cls, settings: VisionSettings) -> Self:
        """Read the processor of a checkpoint; raises CheckpointError for broken files."""

    @staticmethod
    def common(
        settings: VisionSettings, feature: int, filter: int, colours: Normalisation, **how: bool
    ) -> dict[str, Any]:
        """The fields above, where one token stands for a picture and for a feature.

        `filter`, `colours`: where the files name none; `how`: see `VisionSettings.normalisation`.
        """
        normalisation = settings.normalisation(colours, **how)
        return {
            "placeholder_id": feature,
            "feature_id": feature,
            "resample": settings.resample(filter),
            "scale": ColourScale(settings.real("rescale_factor", 1 / 255), *normalisation),
        }

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
        mrope_grid: tuple[int, int] | None = None,
        times: tuple[int, ...] = (0,),
    ) -> Picture:
        """The picture of these tiles and tokens; `mrope_grid` and `times`: see Picture."""
        return Picture(
            tiles=tiles,
            token_ids=token_ids,
            feature_id=self.feature_id,
            digest=digest_of(self, tiles),
            mrope_grid=mrope_grid,
            sees_itself=self.sees_itself,
            times=times,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoProcessor(ABC):
    """The videos of one model."""

    placeholder: str  # text that the chat template writes for one video
    placeholder_id: int  # its token, which also stands for one feature

    @classmethod
    @abstractmethod
    def read(cls, settings: VisionSettings) -> "Self | None":
        """Read the processor of a checkpoint; None: its vocabulary has no token for videos.

        Raises:
            CheckpointError: broken files.
        """

    @abstractmethod
    def prepare(self, video: Video, *, max_tokens: int) -> Shown:
        """Choose frames and make them ready.

        Args:
            max_tokens: features of each picture that the video is made of, a frame or a pair of
                frames.

        Raises:
            PictureError: a frame cannot be read.
        """
