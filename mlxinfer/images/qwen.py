"""Pictures and videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5 to 3.8.

Their towers see the frames of a video two at a time.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Self

import numpy as np

from .picture import Picture, Shown, Tile
from .pixels import Levels, colours_first, cut, resized
from .processor import ImageProcessor, VideoProcessor
from .resize import Size, fit_area
from .settings import BICUBIC, CLIP, HALF, VisionSettings
from .video import Video, evenly, every

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
        second = settings.model_type.startswith(("qwen2_vl", "qwen2_5_vl"))
        low, high = (3_136, 1_003_520) if second else (65_536, 16_777_216)
        feature = settings.token("image_token_id", text="<|image_pad|>")
        return cls(
            **cls.common(settings, feature, BICUBIC, CLIP if second else HALF),
            patch=settings.tower_number("patch_size", 14 if second else 16),
            merge=settings.tower_number("spatial_merge_size", settings.number("merge_size", 2)),
            frames=settings.tower_number("temporal_patch_size", 2),
            low=settings.number("min_pixels", settings.size("shortest_edge", low)),
            high=settings.number("max_pixels", settings.size("longest_edge", high)),
        )

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        tile = self.tile([self.blocks(image, self.fit(image, max_tokens))])
        ids = (self.feature_id,) * tile.num_features
        return self.picture((tile,), ids, mrope_grid=self.mrope_grid(tile))

    def fit(self, image: "Image", max_tokens: int, frames: int = 1, step: int = 1) -> Size:
        """The size of a picture, or of the frames of a video; same arguments as `fit_area`."""
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

    def mrope_grid(self, tile: Tile) -> tuple[int, int]:
        return tile.grid[1] // self.merge, tile.grid[2] // self.merge


PAD = "<|video_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVideos(VideoProcessor):
    """Videos of Qwen's families.

    Attributes:
        frames: makes frames ready; its limits of pixels are those of videos.
        fps: frames in a second that are looked at.
        least, most: frames, if the video has as many.
        interval: positions in time of a second; 0: a tile is one position.
    """

    frames: QwenProcessor
    fps: float
    least: int
    most: int
    interval: int

    @classmethod
    def read(cls, settings: VisionSettings) -> Self | None:
        if settings.found_token("video_token_id", text=PAD) is None:
            return None
        feature, of_videos = settings.token("video_token_id", text=PAD), settings.of_videos()
        low, high = cls._limits()
        frames = replace(
            QwenProcessor.read(of_videos),
            placeholder_id=feature,
            feature_id=feature,
            low=of_videos.number("min_pixels", of_videos.size("shortest_edge", low)),
            high=of_videos.number("max_pixels", of_videos.size("longest_edge", high)),
        )
        timed = settings.model_type == "qwen2_5_vl"
        return cls(
            placeholder=PAD,
            placeholder_id=feature,
            frames=frames,
            fps=of_videos.real("fps", 2.0),
            least=of_videos.number("min_frames", 4),
            most=of_videos.number("max_frames", 768),
            interval=settings.tower_number("tokens_per_second", 4) if timed else 0,
        )

    @staticmethod
    @abstractmethod
    def _limits() -> tuple[int, int]:
        """Pixels at least and at most, where no file says them."""

    def _tiles(self, video: Video, numbers: list[int], max_tokens: int, counted: int) -> list[Tile]:
        step, images = self.frames.frames, video.read(numbers)
        first = next(images)
        size = self.frames.fit(first, max_tokens, counted, step if counted > 1 else 1)
        images, tiles = chain([first], images), list[Tile]()
        while group := list(islice(images, step)):
            tiles.append(self.frames.tile([self.frames.blocks(one, size) for one in group]))
        return tiles

    def _picture(self, tiles: list[Tile], times: tuple[int, ...] = (0,)) -> Picture:
        ids = (self.placeholder_id,) * sum([tile.num_features for tile in tiles])
        return self.frames.picture(tuple(tiles), ids, self.frames.mrope_grid(tiles[0]), times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Videos(QwenVideos):
    """Videos of Qwen2-VL and Qwen2.5-VL: one run of features, whose positions say the time."""

    @staticmethod
    def _limits() -> tuple[int, int]:
        return 128 * 28**2, 768 * 28**2  # of a frame

    def prepare(self, video: Video, *, max_tokens: int) -> Shown:
        step = self.frames.frames
        numbers = every(video, fps=self.fps, least=self.least, most=self.most, step=step)
        tiles = self._tiles(video, numbers, max_tokens, 1)
        seconds = step / (len(numbers) / video.num_frames * video.fps)  # of a tile
        interval = np.float32(self.interval) * np.float32(seconds) if self.interval else 1
        times = np.arange(len(tiles), dtype=np.float32) * np.float32(interval)
        picture = self._picture(tiles, tuple(times.astype(np.int64).tolist()))
        return Shown((picture,), PAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Videos(QwenVideos):
    """Videos of Qwen3-VL and Qwen 3.5 to 3.8: a picture of each two frames, behind its time."""

    @staticmethod
    def _limits() -> tuple[int, int]:
        return 128 * 32**2, 768 * 32**2  # of all frames

    def prepare(self, video: Video, *, max_tokens: int) -> Shown:
        step = self.frames.frames
        numbers = evenly(video, fps=self.fps, least=self.least, most=self.most)
        tiles = self._tiles(video, numbers, max_tokens, max(step, len(numbers)))
        seconds = [number / video.fps for number in numbers + numbers[-1:] * (-len(numbers) % step)]
        spoken = [
            f"<{(first + last) / 2:.1f} seconds><|vision_start|>{PAD}<|vision_end|>"
            for first, last in zip(seconds[::step], seconds[step - 1 :: step], strict=True)
        ]
        return Shown(tuple(self._picture([tile]) for tile in tiles), "".join(spoken))
