"""Requests, answers and stream events of chat completions, as OpenAI writes them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...core import MAX_LOGPROBS, FinishReason
from ...output_parts import ToolCall, ToolCallDelta
from ...session.results import Result
from ..fields.checks import refuse
from ..fields.grammar import ConstraintFields
from ..fields.prompt import Effort
from .chat_prompt import Message
from .logprobs import ChoiceLogprobs
from .types import Usage, finish_reason


class ToolFields(ConstraintFields, kw_only=True):
    """Tool fields of chat requests.

    A call that tool_choice demands always conforms to its tool's schema. So does a call that the
    model chooses to make, if a tool is `strict` and the model marks calls by special tokens, as
    nearly all do; for calls in plain text (Llama 3) `strict` has no effect. An answer has at most
    32 calls under such a grammar (`text/tools/lark.py`), or one if parallel_tool_calls is false, so
    that it ends whatever the model does.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None


class ChatFunction(msgspec.Struct, kw_only=True):
    """The function of a call; its arguments are a JSON object in a string."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A complete call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: ChatFunction


class FunctionPiece(msgspec.Struct, kw_only=True):
    """A delta of a function; only the first one has the name."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPiece(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call; only the first one has id and type."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionPiece


def refuse_old_tools(fields: ToolFields) -> None:
    """Raise UnsupportedFieldError for `functions`, which tools have replaced."""
    refuse("functions", fields.functions, ([],))
    refuse("function_call", fields.function_call, ("none", "auto"))


def chat_tool_calls(calls: Sequence[ToolCall]) -> list[ChatToolCall]:
    """The calls of a complete answer."""
    return [
        ChatToolCall(id=c.id, function=ChatFunction(name=c.name, arguments=c.arguments))
        for c in calls
    ]


def chat_tool_pieces(pieces: Sequence[ToolCallDelta]) -> list[ToolCallPiece]:
    """The deltas of calls in a chunk."""
    return [_piece(piece) for piece in pieces if piece.id is not None or piece.arguments]


def _piece(piece: ToolCallDelta) -> ToolCallPiece:
    function = FunctionPiece(arguments=piece.arguments)
    if piece.id is None or piece.name is None:
        return ToolCallPiece(index=piece.index, function=function)
    function.name = piece.name
    return ToolCallPiece(index=piece.index, id=piece.id, type="function", function=function)


def chat_finish_reason(result: Result) -> str:
    """OpenAI's finish reason: `tool_calls` for an answer that ended with calls."""
    if result.tool_calls and result.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return finish_reason(result.finish_reason)


Positive = Annotated[int, Meta(ge=1)]


class ChatRequest(ToolFields, kw_only=True):
    """A conversation to be answered."""

    messages: list[Message]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    echo: Any = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to a request without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The choice that a chunk continues."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
