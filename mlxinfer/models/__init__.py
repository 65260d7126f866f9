"""Model definitions: a checkpoint folder in, a callable decoder out."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decoder import Model

__all__ = ["load"]


def load(folder: Path, *, dtype: str = "auto") -> "Model":
    """The model in a checkpoint folder, evaluated and ready.

    Args:
        folder: config.json and safetensors, as the hub has them.
        dtype: "auto" (the checkpoint's own on Metal, but bfloat16 where float16 is too small for
            the architecture; float32 on the CPU), "float32", "bfloat16" or "float16".

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: the architecture, or a feature of it, is not supported.
        CheckpointError: a file is broken or disagrees with the config.
        InvalidRequestError: an unknown dtype.
    """
    from .config import load_config
    from .registry import family
    from .weights import Weights, load_tensors

    folder = Path(folder)
    config = load_config(folder)
    builder = family(config.model_type)
    weights = Weights(
        load_tensors(folder),
        quantization=config.quantization,
        dtype=dtype,
        fits_float16=builder.fits_float16,
        rename=builder.rename,
    )
    model: Model = builder.build(config, weights)
    return model
