"""Requests and answers of OpenAI's responses API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...core import MAX_LOGPROBS
from ..fields.checks import agreed, refuse
from ..fields.prompt import Effort
from ..fields.sampling import OtherServersFields
from .logprobs import TokenLogprob

LOGPROBS = "message.output_text.logprobs"  # of `include`
Status = Literal["in_progress", "completed", "incomplete"]
_NOT_OF_THIS_API: dict[str, tuple[Any, ...]] = {  # and the values that change nothing
    "stop": ([],),
    "stop_sequences": ([],),
    "n": (1,),
    "logprobs": (False,),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": ({"type": "text"},),
}


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, a call, its output or reasoning, by `type`.

    Fields of any type differ between items: an item that is skipped has its own.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Form of the visible text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a wish; no template reads it


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model shall reason. The answer carries the reasoning itself, not a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(OtherServersFields, kw_only=True):
    """A conversation to be answered. Its response is stored unless `store` is false."""

    input: str | list[InputItem] = msgspec.field(default_factory=list)
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    reasoning_effort: Effort | None = None  # chat's name of `reasoning.effort`
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None  # `store` of the answer says whether it is
    truncation: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tool_calls: Any = None
    moderation: Any = None
    context_management: Any = None
    stop: Any = None
    stop_sequences: Any = None
    n: Any = None
    logprobs: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None

    def prepare(self) -> None:
        """Resolve fields of other APIs; raises as the same method of SamplerFields."""
        super().prepare()
        own = self.reasoning.effort if self.reasoning else None
        names = {"reasoning.effort": own, "reasoning_effort": self.reasoning_effort}
        self.reasoning_effort = agreed(names)

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for fields that would change the answer."""
        OtherServersFields.refuse(self)
        for name in ("conversation", "prompt", "max_tool_calls"):
            refuse(name, getattr(self, name))
        refuse("background", self.background, (False,))
        refuse("truncation", self.truncation, ("disabled", "auto"))
        refuse("moderation", self.moderation)
        refuse("context_management", self.context_management, ([],))
        for name in self.include or ():
            if name != LOGPROBS:
                refuse("include", name, ("reasoning.encrypted_content",))
        for name, neutral in _NOT_OF_THIS_API.items():
            refuse(name, getattr(self, name), neutral)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens are named beside each; None: none are scored."""
        asked = LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else self.top_logprobs or None


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """Visible text."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """Reasoning of the model."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """Visible text as an item."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """Reasoning as an item."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class CallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call as an item."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool as an item; its input is plain text."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(msgspec.Struct, kw_only=True):
    """Details of the prompt's token count."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Details of the answer's token count."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The answer, and an echo of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    frequency_penalty: float
    presence_penalty: float
    top_logprobs: int = 0
    max_tool_calls: None = None
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | UnsetType = UNSET
