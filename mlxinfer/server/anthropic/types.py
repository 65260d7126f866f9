"""Requests, answers and errors of Anthropic's messages API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError, MlxinferError
from ..errors import PromptTooLongError
from ..fields.checks import refuse
from ..fields.sampling import OtherServersFields, StopString
from ..http import sse
from ..http.replies import ErrorStyle, clipped_message, encode

MAX_STOPS = 64
_NOT_OF_THIS_API: dict[str, tuple[Any, ...]] = {  # and the values that change nothing
    "stop": ([],),
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
}


class Block(msgspec.Struct, kw_only=True):
    """A content block of any type: of a message, a system prompt or a tool result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn; system messages may be among them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool of the client's own, one with a schema that Anthropic has defined, or a hosted one."""

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool is used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model may reason before it answers.

    The switch has no effect on templates without one. The budget holds whatever the template: the
    reasoning is closed after so many tokens.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Any = None


class CountRequest(OtherServersFields, kw_only=True):
    """A conversation, for its tokens to be counted."""

    messages: Annotated[list[AnthropicMessage], Meta(max_length=100_000)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Any = None
    container: Any = None
    context_management: Any = None

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for fields that would change the answer."""
        OtherServersFields.refuse(self)
        refuse("mcp_servers", self.mcp_servers, ([],))
        refuse("container", self.container)
        if not _keeps_all(self.context_management):
            refuse("context_management", self.context_management, ({},))


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    speed: Any = None
    diagnostics: Any = None
    stop: Any = None
    n: Any = None
    logprobs: Any = None
    response_format: Any = None
    reasoning_effort: Any = None

    @property
    def shows_thinking(self) -> bool:
        """Whether thoughts are shown; otherwise their blocks are empty."""
        return self.thinking is None or self.thinking.display != "omitted"

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for what would change the answer and is not there.

        Raises InvalidRequestError for a budget for thinking that leaves nothing for the answer.
        """
        super().refuse()
        if self.thinking is not None and self.thinking.type == "enabled":
            budget = self.thinking.budget_tokens
            if budget is not None and budget >= self.max_tokens:  # some clients send none
                raise InvalidRequestError(
                    f"thinking.budget_tokens is {budget}; expected a number below max_tokens, "
                    f"{self.max_tokens}.",
                    param="thinking.budget_tokens",
                )
        refuse("speed", self.speed, ("standard",))
        refuse("diagnostics", self.diagnostics)
        for name, neutral in _NOT_OF_THIS_API.items():
            refuse(name, getattr(self, name), neutral)


def _keeps_all(management: Any) -> bool:
    """Whether a context_management asks for what happens anyway: nothing is cleared."""
    edits = management.get("edits", []) if isinstance(management, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits
    )


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Visible text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning of the model; the signature is never checked."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Token counts; input_tokens are those not read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnthropicAnswer(msgspec.Struct, kw_only=True):
    """The answer to a request without `stream`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: MlxinferError) -> dict[str, object]:
    """The body of an error."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, fallback)
    message = clipped_message(error)
    if isinstance(error, PromptTooLongError):  # agents read both numbers from these words
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_prompt} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = ErrorStyle(
    body=lambda error: encode(anthropic_error(error)),
    event=lambda error: sse.named("error", anthropic_error(error)),
)
