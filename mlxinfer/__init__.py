"""mlxinfer: LLM inference on Apple silicon where every feature works with every other.

Importing this package imports nothing else of it; each name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import FinishReason, Request, SamplingParams, TokenEvent
    from .errors import (
        AdapterNotFoundError,
        BackendMissingError,
        CheckpointError,
        ContextLengthError,
        ConversationNotFoundError,
        ConversionError,
        DeviceLostError,
        DownloadError,
        EngineClosedError,
        GrammarFailedError,
        HistoryError,
        InsufficientMemoryError,
        InvalidRequestError,
        MlxinferError,
        ModelError,
        ModelNotFoundError,
        NoServerError,
        OverloadedError,
        PartNotFoundError,
        PictureError,
        PromptTooLongError,
        RanksFailedError,
        RequestFailedError,
        ServerError,
        ServiceError,
        SilentServerError,
        StorageFullError,
        TemplateError,
        UnknownArgumentError,
        UnsupportedFieldError,
        UnsupportedModelError,
    )
    from .library import convert_model, list_models, pull
    from .library import convert_model as convert
    from .llm import LLM
    from .outputs import Delta, Facts, Ranked, Result, Results, Timing, ToolCall, ToolCallDelta
    from .program import Branches, Program, Selection

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterNotFoundError",
    "BackendMissingError",
    "Branches",
    "CheckpointError",
    "ContextLengthError",
    "ConversationNotFoundError",
    "ConversionError",
    "Delta",
    "DeviceLostError",
    "DownloadError",
    "EngineClosedError",
    "Facts",
    "FinishReason",
    "GrammarFailedError",
    "HistoryError",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "MlxinferError",
    "ModelError",
    "ModelNotFoundError",
    "NoServerError",
    "OverloadedError",
    "PartNotFoundError",
    "PictureError",
    "Program",
    "PromptTooLongError",
    "Ranked",
    "RanksFailedError",
    "Request",
    "RequestFailedError",
    "Result",
    "Results",
    "SamplingParams",
    "Selection",
    "ServerError",
    "ServiceError",
    "SilentServerError",
    "StorageFullError",
    "TemplateError",
    "Timing",
    "TokenEvent",
    "ToolCall",
    "ToolCallDelta",
    "UnknownArgumentError",
    "UnsupportedFieldError",
    "UnsupportedModelError",
    "__version__",
    "convert",
    "convert_model",
    "list_models",
    "pull",
]

_HOMES = {
    "LLM": "llm",
    "convert_model": "library",
    "list_models": "library",
    "pull": "library",
    "Branches": "program",
    "Program": "program",
    "Selection": "program",
    "Delta": "outputs",
    "Facts": "outputs",
    "Ranked": "outputs",
    "Result": "outputs",
    "Results": "outputs",
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
    if name == "convert":  # a package that can be called
        return import_module(".convert", __name__)
    home = _HOMES.get(name, "errors")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Register `%llm` and `%%llm`; IPython calls it for `%load_ext mlxinfer`."""
    from .magics import Magics

    shell.register_magic_function(Magics(shell.user_ns).ask, "line_cell", "llm")


def __dir__() -> list[str]:
    return sorted(__all__)
