"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5 to 3.8: their frames are seen by twos.

Source: transformers 5.24, models/qwen2_vl, qwen2_5_vl and qwen3_vl.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Self

import numpy as np

from .picture import Picture, Shown, Tile
from .processor import VideoProcessor
from .qwen import QwenProcessor
from .settings import VisionSettings
from .video import Video, evenly, every

if TYPE_CHECKING:
    pass

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
        """Read the processor of a checkpoint."""
        if settings.found_token("video_token_id", text=PAD) is None:
            return None
        feature, own = settings.token("video_token_id", text=PAD), settings.of_videos()
        low, high = cls._limits()
        frames = replace(
            QwenProcessor.read(own),
            placeholder_id=feature,
            feature_id=feature,
            low=own.number("min_pixels", own.size("shortest_edge", low)),
            high=own.number("max_pixels", own.size("longest_edge", high)),
        )
        timed = settings.model_type == "qwen2_5_vl"
        return cls(
            placeholder=PAD,
            placeholder_id=feature,
            frames=frames,
            fps=own.real("fps", 2.0),
            least=own.number("min_frames", 4),
            most=own.number("max_frames", 768),
            interval=settings.tower_number("tokens_per_second", 4) if timed else 0,
        )

    @staticmethod
    @abstractmethod
    def _limits() -> tuple[int, int]:
        """Pixels at least and at most, where no file says them."""

    def _tiles(self, video: Video, numbers: list[int], max_tokens: int, counted: int) -> list[Tile]:
        """The tiles of the frames of these numbers. `counted` of them share the pixels."""
        step, images = self.frames.frames, video.read(numbers)
        first = next(images)
        size = self.frames.fit(first, max_tokens, counted, step if counted > 1 else 1)
        images, found = chain([first], images), list[Tile]()
        while group := list(islice(images, step)):
            found.append(self.frames.tile([self.frames.blocks(one, size) for one in group]))
        return found

    def _picture(self, tiles: list[Tile], times: tuple[int, ...] = (0,)) -> Picture:
        ids = (self.placeholder_id,) * sum([tile.num_features for tile in tiles])
        return self.frames.picture(tuple(tiles), ids, self.frames.turns(tiles[0]), times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Videos(QwenVideos):
    """Videos of Qwen2-VL and Qwen2.5-VL: one run of features, whose positions say the time."""

    @staticmethod
    def _limits() -> tuple[int, int]:
        return 128 * 28**2, 768 * 28**2  # of a frame

    def prepare(self, video: Video, *, max_tokens: int) -> Shown:
        """Choose frames and make them ready."""
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
        """Choose frames and make them ready."""
        step = self.frames.frames
        numbers = evenly(video, fps=self.fps, least=self.least, most=self.most)
        tiles = self._tiles(video, numbers, max_tokens, max(step, len(numbers)))
        seconds = [number / video.fps for number in numbers + numbers[-1:] * (-len(numbers) % step)]
        spoken = [
            f"<{(first + last) / 2:.1f} seconds><|vision_start|>{PAD}<|vision_end|>"
            for first, last in zip(seconds[::step], seconds[step - 1 :: step], strict=True)
        ]
        return Shown(tuple(self._picture([tile]) for tile in tiles), "".join(spoken))
