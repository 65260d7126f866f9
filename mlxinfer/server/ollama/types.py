"""Requests, answers and errors of Ollama's API. Source: docs/api.md of Ollama; its library 0.6."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import MlxinferError
from ..errors import UnsupportedFieldError
from ..fields.checks import refuse
from ..fields.prompt import Effort
from ..fields.sampling import SamplingFields
from ..http.replies import ErrorStyle, clipped_message, encode

NDJSON = b"application/x-ndjson"


class Options(SamplingFields, kw_only=True):
    """Sampling options; those of the machine (num_ctx, num_gpu, …) are the server's own here."""

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for an option that would change the answer."""
        super().refuse()
        refuse("n", self.n, (1,))


class CallFunction(msgspec.Struct, kw_only=True):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = {}


class Called(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call of a tool."""

    function: CallFunction
    id: str | None = None


class ChatTurn(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class AskFields(msgspec.Struct, kw_only=True):
    """Fields that chats and plain texts share."""

    model: str
    stream: bool | None = None  # true unless it is false
    format: Any = None
    options: Options | None = None
    think: bool | Effort | None = None
    keep_alive: Any = None  # 0 without a prompt unloads; otherwise the server's own times hold
    logprobs: bool | None = None
    top_logprobs: Any = None

    def prepare(self) -> Options:
        """The options, resolved; raise UnsupportedFieldError for unsupported fields."""
        refuse("logprobs", self.logprobs, (False,))
        options = self.options or Options()
        options.prepare()
        return options

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model."""
        return self.keep_alive in (0, "0", "0s", "0m")


class ChatAsk(AskFields, kw_only=True):
    """A conversation to be answered; without messages the model is loaded, or unloaded."""

    messages: list[ChatTurn] = []
    tools: list[dict[str, Any]] | None = None


class GenerateAsk(AskFields, kw_only=True):
    """A text to be answered, or continued as it is (`raw`)."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None

    def prepare(self) -> Options:
        """The options, resolved; raise UnsupportedFieldError for unsupported fields."""
        refuse("template", self.template, ("",))
        refuse("context", self.context, ([],))
        if self.images:
            raise no_images("images")
        return super().prepare()


class SaidMessage(msgspec.Struct, kw_only=True):
    """A message of an answer, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Called] | UnsetType = UNSET


class Said(msgspec.Struct, kw_only=True):
    """An answer, or a piece of it; the last one has the counts. Durations are nanoseconds."""

    model: str
    created_at: str
    message: SaidMessage | UnsetType = UNSET  # of chats
    response: str | UnsetType = UNSET  # of plain texts
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class NamedModel(msgspec.Struct, kw_only=True):
    """A request about one model; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: Annotated[Any, Meta(description="not supported")] = None

    @property
    def called(self) -> str:
        """The model's name."""
        return self.model or self.name or ""


def now() -> str:
    """The time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def no_images(param: str) -> UnsupportedFieldError:
    """The error of a request with images."""
    return UnsupportedFieldError("images are not supported: models read text only.", param=param)


def line(value: Any) -> bytes:
    """One line of a stream."""
    return encode(value) + b"\n"


def _error(error: MlxinferError) -> bytes:
    return encode({"error": clipped_message(error)})


OLLAMA = ErrorStyle(body=_error, event=lambda error: _error(error) + b"\n")
