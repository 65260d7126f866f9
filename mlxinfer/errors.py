"""Every exception that mlxinfer raises on purpose, in one tree, and checks of single arguments.

    MlxinferError                      500  internal_error
    ├── InvalidRequestError            400  invalid_request        also a ValueError
    │   ├── ContextLengthError         400  context_length_exceeded
    │   │   └── PromptTooLongError     400  context_length_exceeded
    │   ├── UnsupportedFieldError      400  unsupported_parameter
    │   ├── InsufficientMemoryError    400  insufficient_memory    can never fit
    │   ├── PictureError               400  invalid_image          broken, unknown or too large
    │   └── UnknownArgumentError       400  unknown_argument       also a TypeError
    ├── ModelError                     400  model_error
    │   ├── ModelNotFoundError         404  model_not_found
    │   │   └── AdapterNotFoundError   404  adapter_not_found
    │   ├── UnsupportedModelError      400  unsupported_model
    │   ├── CheckpointError            400  bad_checkpoint         broken, truncated or lying files
    │   └── DownloadError              502  download_failed
    ├── ConversionError                400  conversion_failed      nothing that was there is lost
    ├── TemplateError                  400  template_error
    ├── OverloadedError                503  overloaded             could fit later
    ├── EngineClosedError              503  engine_closed
    │   ├── RanksFailedError           503  ranks_failed           one of several ranks is gone
    │   └── DeviceLostError            503  device_lost            the GPU refuses this process
    ├── RequestFailedError             500  request_failed         a step of this request went wrong
    │   └── GrammarFailedError         400  grammar_failed         its own grammar cannot go on
    ├── HistoryError               503  history_error          the file of conversations
    ├── StorageFullError           507  storage_full           of a disk, or of one key
    ├── ConversationNotFoundError  404  not_found              no such conversation
    ├── ServiceError                   500  service_error          launchd refused, or is not here
    ├── ServerError                    500  server_error           at the URL of an LLM
    │   ├── NoServerError
    │   └── SilentServerError
    └── BackendMissingError            500  backend_missing

Each class knows the HTTP `status` and the machine-readable `code` that a server answers with.
Messages say what came, what was expected and what to do.
"""

import errno
import math
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Self

SQLITE_FULL = 13  # as `sqlite3` has it, whose import takes longer than this module's


class MlxinferError(Exception):
    """Base of everything raised on purpose."""

    status = 500
    code = "internal_error"
    param: str | None = None  # the field of the request that is at fault

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None) -> None:
        cls.status, cls.code = status or cls.status, code or cls.code


class InvalidRequestError(MlxinferError, ValueError, status=400, code="invalid_request"):
    """A parameter or a prompt that can never be served; `param` names it where one is at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of(cls, param: str, said: str) -> Self:
        """The error of a field, with what is said of it behind its name."""
        return cls(f"{param} {said}", param=param)


class PartNotFoundError(InvalidRequestError, KeyError):
    """A program has no part of this name."""

    __str__ = Exception.__str__  # KeyError quotes


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and answer do not fit in the model's context."""


class InsufficientMemoryError(InvalidRequestError, code="insufficient_memory"):
    """The request needs more KV cache than this engine will ever have."""


class PictureError(InvalidRequestError, code="invalid_image"):
    """A picture cannot be read: it is broken, of no known format, too large, or not there."""


class PromptTooLongError(ContextLengthError):
    """The prompt leaves no room for an answer in the model's context.

    The message is in OpenAI's words, because its clients look for them.

    Args:
        num_tokens: of the prompt; a lower bound unless `exact`.
        max_context: tokens of prompt and answer.
        param: the field that holds the prompt.
        exact: the prompt was encoded whole.
    """

    def __init__(self, num_tokens: int, max_context: int, *, param: str, exact: bool) -> None:
        over, what = "" if exact else "more than ", param.partition("[")[0]
        super().__init__(
            f"This model's maximum context length is {max_context} tokens, and an answer needs at "
            f"least one. However, your {what} resulted in {over}{num_tokens} tokens. Please "
            f"reduce the length of the {what}.",
            param=param,
        )
        self.num_tokens = num_tokens
        self.max_prompt = max_context - 1


class UnsupportedFieldError(InvalidRequestError, code="unsupported_parameter"):
    """A known field that would change the answer and is not supported."""


class UnknownArgumentError(InvalidRequestError, TypeError, code="unknown_argument"):
    """A call has no argument of this name."""


class ModelError(MlxinferError, status=400, code="model_error"):
    """A model cannot be found, read or run."""


class ModelNotFoundError(ModelError, status=404, code="model_not_found"):
    """No folder, bundled model or hub repository has this name."""


class AdapterNotFoundError(ModelNotFoundError, code="adapter_not_found"):
    """No folder with an adapter is there."""


class UnsupportedModelError(ModelError, code="unsupported_model"):
    """The checkpoint is sound, but its architecture or a feature of it is not supported."""


class CheckpointError(ModelError, code="bad_checkpoint"):
    """A file of the checkpoint is broken, truncated, or disagrees with the config."""


class DownloadError(ModelError, status=502, code="download_failed"):
    """The hub could not be reached, refused, or sent something else."""


class ConversionError(MlxinferError, status=400, code="conversion_failed"):
    """A conversion cannot start, go on, or pass its checks; what was there before still is."""


class TemplateError(MlxinferError, status=400, code="template_error"):
    """The chat template refused these messages, or ran past its limits."""


class OverloadedError(MlxinferError, status=503, code="overloaded"):
    """No room now; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HistoryError(MlxinferError, status=503, code="history_error"):
    """The file of conversations cannot be opened, read or written."""


class StorageFullError(MlxinferError, status=507, code="storage_full"):
    """There is no room on the disk for what the request is to leave there; nothing was stored."""

    @classmethod
    def cause(cls, error: BaseException) -> Self | None:
        """The error where another one says that a disk is full; None: it does not."""
        number = getattr(error, "errno", None) if isinstance(error, OSError) else None
        code = getattr(error, "sqlite_errorcode", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or code == SQLITE_FULL:
            return cls("The disk is full; nothing was stored. Make room there.")
        return None


class ConversationNotFoundError(MlxinferError, status=404, code="not_found"):
    """The history has no such conversation."""


class EngineClosedError(MlxinferError, status=503, code="engine_closed"):
    """The engine was closed, or is closing."""


class RanksFailedError(EngineClosedError, code="ranks_failed"):
    """One of the ranks that a model is spread over has ended, hangs, or disagrees with rank 0."""


class DeviceLostError(EngineClosedError, code="device_lost"):
    """The GPU takes no more work from this process: only a new process can go on."""


class RequestFailedError(MlxinferError, code="request_failed"):
    """A step went wrong while it ran this request; others go on."""


class GrammarFailedError(RequestFailedError, status=400, code="grammar_failed"):
    """The grammar of an answer came to a dead end or a limit: the request's own doing."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ServiceError(MlxinferError, code="service_error"):
    """The system's service manager refused, or is not on this machine."""


class ServerError(MlxinferError, code="server_error"):
    """No mlxinfer server answers, or it refused.

    Attributes:
        refused: status of the server's answer; None: there was none, or of another program.
    """

    refused: int | None = None


class NoServerError(ServerError):
    """Nothing listens at the address."""


class SilentServerError(ServerError):
    """Something listens at the address, and did not answer in time."""


class BackendMissingError(MlxinferError, code="backend_missing"):
    """MLX is not installed, or has no backend for this machine."""


# The name at the end of "[METAL] Command buffer execution failed: Impacting Interactivity
# (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)". MLX raises it as a
# RuntimeError where the work is awaited (mlx/backend/metal/eval.cpp, since MLX 0.32).
_GPU_ERROR = re.compile("CommandBufferCallbackError([A-Za-z]+)")
# Work took too long, blocked the display, was lost with that of another process, or needed too much
# memory. Less work at a time may pass.
_STOPPED = {"Timeout", "ImpactingInteractivity", "Hang", "InnocentVictim", "OutOfMemory"}


def gpu_stopped(error: BaseException) -> bool:
    """Whether macOS stopped work of the GPU that may pass in smaller parts."""
    named = _GPU_ERROR.search(str(error))
    return named is not None and named[1] in _STOPPED


def require_gpu(error: BaseException) -> None:
    """Raise DeviceLostError if an error says that the GPU ignores all work of this process.

    macOS does so after several errors of a process, and until the process ends.
    """
    named = _GPU_ERROR.search(str(error))
    if named is not None and named[1] == "SubmissionsIgnored":
        raise DeviceLostError(
            f"macOS ignores the GPU work of this process after earlier errors ({error}). Only a "
            "new process can go on: start the program again."
        ) from error


def shown(value: object) -> str:
    """A user's value as messages show it: its repr, cut if long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a very large {type(value).__name__}"
    return clipped(text, 80)


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def wrong_value(
    name: str, value: object, wanted: str, param: str | None = None
) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {shown(value)}; expected {wanted}.", param=param or name)


def as_strings(name: str, value: object) -> tuple[str, ...]:
    """The strings of an argument that is one or several; raises InvalidRequestError."""
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, (list, tuple)) and all(isinstance(s, str) and s for s in strings):
        for s in strings:
            if any("\ud800" <= c <= "\udfff" for c in s):
                raise InvalidRequestError.of(
                    name, f"holds {shown(s)}, half of a surrogate pair, which no text has."
                )
        return tuple(strings)
    raise wrong_value(name, value, "non-empty strings")


def check_kind(name: str, value: object, kind: type, wanted: str) -> None:
    """Raise InvalidRequestError unless an argument is of a kind, such as a mapping."""
    if not isinstance(value, kind) or isinstance(value, str | bytes):
        raise wrong_value(name, value, wanted)


def check_int(
    name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """Raise InvalidRequestError unless an argument is an integer within bounds."""
    if value is None and optional:
        return
    if type(value) is not int or value < low or (high is not None and value > high):
        beyond = high is not None and type(value) is int and value > high
        limited = high is not None and (beyond or high < 2**53)  # others are no limits to know of
        bounds = f"from {low} to {high}" if limited else f"of at least {low}"
        raise wrong_value(name, value, f"an integer {bounds}")


def check_number(
    name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise InvalidRequestError unless an argument is a finite number within bounds."""
    sound = type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    above = sound and (value > low if open_low else value >= low)  # type: ignore[operator]
    if not above or value > high:  # type: ignore[operator]
        bounds = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        if high == math.inf:
            bounds = f"{'above' if open_low else 'from'} {low:g}"
        raise wrong_value(name, value, f"a finite number {bounds}")


def check_token_ids(ids: Iterable[object], vocab_size: int, *, param: str) -> None:
    """Raise InvalidRequestError unless every id is an integer in [0, vocab_size)."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} holds {shown(token_id)}; token ids are integers from 0 to "
                f"{vocab_size - 1}.",
                param=param,
            )


def check_function(name: str, value: object) -> None:
    """Raise InvalidRequestError unless an argument can be called."""
    if not callable(value):
        raise wrong_value(name, value, "a function")


def check_switch(name: str, value: object) -> None:
    """Raise InvalidRequestError unless an argument is a bool: "false" would be true."""
    if type(value) is not bool:
        raise wrong_value(name, value, "True or False")


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownArgumentError for a keyword argument that the function does not take."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known)}."
            raise UnknownArgumentError(f"{function}() takes no {name!r}. {hint}", param=name)
