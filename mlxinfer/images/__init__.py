"""Pictures: from a file to the patches that a tower reads, and the tokens that stand for them."""

from collections.abc import Callable
from pathlib import Path

from .gemma import Gemma3Processor, Gemma4Processor, Gemma4Videos
from .lfm2 import Lfm2Processor
from .load import (
    data_url,
    from_base64,
    from_data_url,
    load_image,
    open_image,
    picture_file,
    thumbnail_url,
)
from .own_size import InklingProcessor, PixtralProcessor
from .picture import Picture, PlacedPicture, Shown, Tile, rope_delta, rope_positions
from .processor import ImageProcessor, VideoProcessor
from .qwen import Qwen2Videos, Qwen3Videos, QwenProcessor
from .settings import VisionSettings
from .video import Video, load_video

PROCESSORS: dict[str, type[ImageProcessor]] = {
    **dict.fromkeys(
        (
            "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
            "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35",
        ),
        QwenProcessor,
    ),
    "gemma3": Gemma3Processor,
    **dict.fromkeys(("gemma4", "gemma4_unified"), Gemma4Processor),
    "inkling2_loop": InklingProcessor,
    "lfm2_vl": Lfm2Processor,
    **dict.fromkeys(("pixtral", "mistral3"), PixtralProcessor),
}  # fmt: skip

_VIDEOS: dict[str, type[VideoProcessor]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Qwen2Videos),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"), Qwen3Videos
    ),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Gemma4Videos),
}


def image_processor(folder: Path, token_id: Callable[[str], int | None]) -> ImageProcessor | None:
    """The processor of a checkpoint's pictures; None: it reads none.

    Args:
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
