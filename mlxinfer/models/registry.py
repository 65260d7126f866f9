"""Which module builds which architecture; a module is imported when it is used. No mlx."""

from importlib import import_module
from typing import Any

from ..errors import UnsupportedModelError

_MODULES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3_moe": "moe",
    "gemma3": "gemma",
    "gemma3_text": "gemma",
    "gpt_oss": "gpt_oss",
}

SUPPORTED = tuple(_MODULES)
OUTGROW_FLOAT16 = frozenset({"gemma3_text"})  # their residual stream passes 65,504


def check(model_type: str) -> None:
    """Raise UnsupportedModelError unless a family builds this architecture."""
    if model_type not in _MODULES:
        raise UnsupportedModelError(
            f"The architecture {model_type[:60]!r} is not supported; supported are "
            f"{', '.join(SUPPORTED)}."
        )


def family(model_type: str) -> Any:
    """The family module: `build(config, weights) -> Model` and `rename(name) -> name | None`.

    Raises:
        UnsupportedModelError: no family builds this architecture.
    """
    check(model_type)
    return import_module(f".families.{_MODULES[model_type]}", __package__)
