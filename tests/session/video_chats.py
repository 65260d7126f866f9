"""Conversations with videos, for models of several families.

The script that writes references and the tests that compare with them both read this.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4_moe")


def some_frames(count: int, width: int = 48, height: int = 40) -> list[Image.Image]:
    """Noise; no two frames are equal."""
    shape = (count, height, width, 3)
    pixels = np.random.default_rng(count).integers(0, 256, shape, dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


class Clip(NamedTuple):
    """A video: frames, and how many are a second."""

    count: int
    fps: float
    width: int
    height: int

    @property
    def part(self) -> dict[str, Any]:
        """Of a message."""
        frames = some_frames(self.count, self.width, self.height)
        return {"type": "video", "frames": frames, "fps": self.fps}


EXACT = Clip(4, 2.0, 32, 24)  # needs no resizing in Qwen's families
CLIPS = {
    "exact": EXACT,
    "odd": Clip(7, 1.5, 40, 48),
    "fast": Clip(33, 7.0, 16, 24),
    "slow": Clip(6, 0.01, 24, 16),
    "resized": Clip(5, 2.0, 150, 90),
    "large": Clip(3, 0.5, 480, 336),  # needs none in Gemma 4
}

SAME_SIZE = {name: ("exact", "slow") if "qwen" in name else ("large",) for name in NAMES}


def some(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """About 500 of the numbers, at places that depend on how many there are."""
    return pixels[:: max(1, pixels.size // 499)]


def chat(clip: Clip) -> list[dict[str, Any]]:
    """A message with a video between texts."""
    parts = [{"type": "text", "text": "Look 1"}, clip.part, {"type": "text", "text": "2 What?"}]
    return [{"role": "user", "content": parts}]
