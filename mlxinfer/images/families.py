"""Which processor reads the pictures of which models."""

from collections.abc import Callable
from pathlib import Path

from .gemma3 import Gemma3Processor
from .gemma4 import Gemma4Processor
from .lfm2 import Lfm2Processor
from .pixtral import PixtralProcessor
from .processor import ImageProcessor
from .qwen import QwenProcessor
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
