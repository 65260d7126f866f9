"""mlxinfer: LLM inference on Apple silicon where every feature works with every other.

Importing this package imports nothing else of it; each name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import FinishReason, Request, SamplingParams, TokenEvent
    from .errors import (
        BackendMissingError,
        CheckpointError,
        ContextLengthError,
        ConversationNotFoundError,
        ConversionError,
        DownloadError,
        EngineClosedError,
        GrammarFailedError,
        HistoryError,
        InsufficientMemoryError,
        InvalidRequestError,
        MlxinferError,
        ModelError,
        ModelNotFoundError,
        OverloadedError,
        RequestFailedError,
        ServiceError,
        TemplateError,
        UnsupportedModelError,
    )
    from .llm import LLM
    from .outputs import Delta, Result, Timing, ToolCall, ToolCallDelta

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BackendMissingError",
    "CheckpointError",
    "ContextLengthError",
    "ConversationNotFoundError",
    "ConversionError",
    "Delta",
    "DownloadError",
    "EngineClosedError",
    "FinishReason",
    "GrammarFailedError",
    "HistoryError",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "MlxinferError",
    "ModelError",
    "ModelNotFoundError",
    "OverloadedError",
    "Request",
    "RequestFailedError",
    "Result",
    "SamplingParams",
    "ServiceError",
    "TemplateError",
    "Timing",
    "TokenEvent",
    "ToolCall",
    "ToolCallDelta",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "Delta": "outputs",
    "Result": "outputs",
    "Timing": "outputs",
    "ToolCall": "outputs",
    "ToolCallDelta": "outputs",
    "FinishReason": "core",
    "Request": "core",
    "SamplingParams": "core",
    "TokenEvent": "core",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "errors")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
