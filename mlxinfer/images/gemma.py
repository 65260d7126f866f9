"""Pictures of Gemma 3 and 4. Gemma 4 has a tower (E2B, E4B, 26B, 31B) or none (12B, "unified")."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from .picture import Picture, Shown, Tile
from .pixels import ColourScale, colours_first, colours_last, cut, resized
from .processor import ImageProcessor, VideoProcessor
from .resize import fit_soft_tokens, soft_tokens
from .settings import BICUBIC, BILINEAR, HALF, VisionSettings
from .video import Video, at_most

VIDEO = "<|video|>"

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Processor(ImageProcessor):
    """Pictures squeezed into a square. Crops of wide pictures ("pan and scan") are not made."""

    side: int  # of the square in pixels
    patch: int  # side of a patch in pixels
    num_features: int  # of each picture
    end_id: int  # the token behind the features

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Processor(ImageProcessor):
    """Pictures of any ratio, scaled up or down to nearly the full number of tokens.

    Attributes:
        patch: side of a patch in pixels.
        pool: patches along a side of what becomes one feature.
        max_features: of a picture, as the checkpoint says.
        whole: a patch is all that becomes one feature: there is no tower to pool them.
    """

    patch: int
    pool: int
    max_features: int
    whole: bool
    begin_id: int
    end_id: int

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        feature = settings.token("image_token_id", text="<|image|>")
        whole = settings.model_type == "gemma4_unified"
        sees = settings.text.get("use_bidirectional_attention", "vision" if whole else None)
        return cls(
            **cls.common(settings, feature, BICUBIC, HALF, applies=False),
            begin_id=settings.token("boi_token_id", default=255_999),
            end_id=settings.token("eoi_token_id", default=258_882),
            patch=settings.tower_number("patch_size", 16),
            pool=settings.tower_number("pooling_kernel_size", 3),
            max_features=settings.number("max_soft_tokens", 280),
            whole=whole,
            sees_itself=sees == "vision",
        )

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        """Make a picture ready; it has at most one of the numbers of tokens of the training."""
        limit = soft_tokens(min(self.max_features, max_tokens))
        side = self.patch * self.pool
        size = fit_soft_tokens(image.height, image.width, factor=side, limit=limit)
        levels = resized(image, size, self.resample)
        patches = cut(levels, side if self.whole else self.patch)
        tile = Tile(
            patches=colours_last(patches, self.scale),
            grid=(1, *patches.shape[:2]),
            num_features=size[0] * size[1] // side**2,
        )
        features = (self.feature_id,) * tile.num_features
        return self.picture((tile,), (self.begin_id, *features, self.end_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Videos(VideoProcessor):
    """Videos of Gemma 4: a small picture of each frame, behind its minute and second."""

    frames: Gemma4Processor  # makes frames ready
    num_frames: int  # that are looked at, if the video has as many

    @classmethod
    def read(cls, settings: VisionSettings) -> Self | None:
        if settings.found_token("video_token_id", text=VIDEO) is None:
            return None
        feature, of_videos = settings.token("video_token_id", text=VIDEO), settings.of_videos()
        frames = replace(
            Gemma4Processor.read(of_videos),
            placeholder_id=feature,
            feature_id=feature,
            max_features=of_videos.number("max_soft_tokens", 70),
        )
        return cls(
            placeholder=VIDEO,
            placeholder_id=feature,
            frames=frames,
            num_frames=of_videos.number("num_frames", 32),
        )

    def prepare(self, video: Video, *, max_tokens: int) -> Shown:
        numbers = at_most(video, self.num_frames)
        pictures = [self.frames.prepare(one, max_tokens=max_tokens) for one in video.read(numbers)]
        times = [divmod(int(number / video.fps), 60) for number in numbers]
        spoken = [f"{minute:02d}:{second:02d} {VIDEO}" for minute, second in times]
        return Shown(tuple(pictures), " ".join(spoken))
