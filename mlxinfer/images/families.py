"""Which processors read the pictures and the videos of which models."""

from collections.abc import Callable
from pathlib import Path

from .gemma import Gemma3Processor, Gemma4Processor, Gemma4Videos
from .lfm2 import Lfm2Processor
from .pixtral import PixtralProcessor
from .processor import ImageProcessor, VideoProcessor
from .qwen import Qwen2Videos, Qwen3Videos, QwenProcessor
from .settings import VisionSettings

PROCESSORS: dict[str, type[ImageProcessor]] = {
    **dict.fromkeys(
        (
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
            *("qwen3_5", "qwen3_5_moe"),
        ),
        QwenProcessor,
    ),
    "gemma3": Gemma3Processor,
    **dict.fromkeys(("gemma4", "gemma4_unified"), Gemma4Processor),
    "lfm2_vl": Lfm2Processor,
    **dict.fromkeys(("pixtral", "mistral3"), PixtralProcessor),
}

_VIDEOS: dict[str, type[VideoProcessor]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Qwen2Videos),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), Qwen3Videos),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Gemma4Videos),
}


def image_processor(folder: Path, token_id: Callable[[str], int | None]) -> ImageProcessor | None:
    """The processor of a checkpoint's pictures; None: it reads none.

    Args:
        folder: of the checkpoint.
        token_id: the id of a token's text; None where the vocabulary has no such token.

    Raises:
        CheckpointError: the files about pictures are broken or incomplete.
    """
    settings = VisionSettings(folder, token_id)
    kind = PROCESSORS.get(settings.model_type)
    return kind.read(settings) if kind is not None and settings.vision else None


def video_processor(folder: Path, token_id: Callable[[str], int | None]) -> VideoProcessor | None:
    """The processor of a checkpoint's videos; None: it reads none.

    Args and errors: those of `image_processor`.
    """
    settings = VisionSettings(folder, token_id)
    kind = _VIDEOS.get(settings.model_type)
    return kind.read(settings) if kind is not None and settings.vision else None
