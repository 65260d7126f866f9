"""Tools in OpenAI's requests, and calls of them in its answers. Knows fields; plans nothing."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...core import FinishReason
from ...parts import ToolCall, ToolCallDelta
from ...results import Result
from ..fields.constraints import ConstraintFields
from ..fields.refused import refuse
from .types import finish_reason


class ToolFields(ConstraintFields, kw_only=True):
    """Of chat requests.

    A call that tool_choice demands always keeps to the schema of its tool. So does one that the
    model makes by itself, if a tool is `strict` and the model marks its calls by tokens of their
    own, as nearly all do; where it writes them as plain text (Llama 3), `strict` changes nothing.
    Calls under such a grammar are at most 32 (`text/tools/lark.py`), or one where
    parallel_tool_calls is false, so that an answer ends whatever the model does.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None


class ChatFunction(msgspec.Struct, kw_only=True):
    """What is called; the arguments are a JSON object in a string."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A complete call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: ChatFunction


class FunctionPiece(msgspec.Struct, kw_only=True):
    """The name comes in the first piece only."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPiece(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call; id and type come in the first one only."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionPiece


def refuse_old_tools(fields: ToolFields) -> None:
    """Raise UnsupportedFieldError for the functions that tools have replaced."""
    refuse("functions", fields.functions, ([],))
    refuse("function_call", fields.function_call, ("none", "auto"))


def chat_tool_calls(calls: Sequence[ToolCall]) -> list[ChatToolCall]:
    """The calls of a whole answer."""
    return [
        ChatToolCall(id=c.id, function=ChatFunction(name=c.name, arguments=c.arguments))
        for c in calls
    ]


def chat_tool_pieces(pieces: Sequence[ToolCallDelta]) -> list[ToolCallPiece]:
    """The pieces of calls that a chunk brings."""
    return [_piece(piece) for piece in pieces if piece.id is not None or piece.arguments]


def _piece(piece: ToolCallDelta) -> ToolCallPiece:
    function = FunctionPiece(arguments=piece.arguments)
    if piece.id is None or piece.name is None:
        return ToolCallPiece(index=piece.index, function=function)
    function.name = piece.name
    return ToolCallPiece(index=piece.index, id=piece.id, type="function", function=function)


def chat_finish_reason(result: Result) -> str:
    """As OpenAI calls it: an answer that ended with calls waits for their results."""
    if result.tool_calls and result.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return finish_reason(result.finish_reason)
