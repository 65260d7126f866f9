"""Tool calls in chat completions: whole, and in the chunks of a stream."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...outputs import CallStatus, ToolCall, ToolCallDelta
from .declared_tools import DeclaredTool, custom_input


class ChatFunction(msgspec.Struct, kw_only=True):
    """The function of a call; its arguments are a JSON object in a string."""

    name: str
    arguments: str


class CustomInput(msgspec.Struct, kw_only=True):
    """The custom tool of a call; its input is plain text."""

    name: str
    input: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A complete call of a tool, which is a function or a custom one."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: ChatFunction | UnsetType = UNSET
    custom: CustomInput | UnsetType = UNSET


class FunctionPiece(msgspec.Struct, kw_only=True):
    """A delta of a function; only the first one has the name."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPiece(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call; only the first one has id and type.

    The call of a custom tool comes in one piece.
    """

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionPiece | UnsetType = UNSET
    custom: CustomInput | UnsetType = UNSET


def chat_tool_calls(
    calls: Sequence[ToolCall], declared: Mapping[str, DeclaredTool]
) -> list[ChatToolCall]:
    """The calls of a complete answer; `declared` has the custom tools by name."""
    found = []
    for call in calls:
        if call.name in declared:
            custom = CustomInput(name=call.name, input=custom_input(call.arguments))
            found.append(ChatToolCall(id=call.id, type="custom", custom=custom))
        else:
            function = ChatFunction(name=call.name, arguments=call.arguments)
            found.append(ChatToolCall(id=call.id, function=function))
    return found


class ToolCallPieces:
    """The deltas of calls in the chunks of one choice.

    Args:
        declared: the custom tools by name; their input is known where their arguments end.
    """

    def __init__(self, declared: Mapping[str, DeclaredTool]) -> None:
        self._declared = declared
        self._custom: dict[int, list[ToolCallDelta]] = {}  # by index, as far as they have come

    def take(self, pieces: Sequence[ToolCallDelta]) -> list[ToolCallPiece]:
        """The deltas of the next pieces."""
        found = []
        for piece in pieces:
            if piece.name in self._declared or piece.index in self._custom:
                found += self._take_custom(piece)
            elif piece.id is not None or piece.arguments:
                found.append(_function_piece(piece))
        return found

    def _take_custom(self, piece: ToolCallDelta) -> list[ToolCallPiece]:
        begun = self._custom.setdefault(piece.index, [])
        begun.append(piece)
        if piece.status is CallStatus.OPEN:
            return []
        del self._custom[piece.index]
        if piece.status is CallStatus.BROKEN:  # all of it follows as text
            return []
        first = begun[0]
        assert first.id is not None
        assert first.name is not None
        text = custom_input("".join(each.arguments for each in begun))
        custom = CustomInput(name=first.name, input=text)
        return [ToolCallPiece(index=piece.index, id=first.id, type="custom", custom=custom)]


def _function_piece(piece: ToolCallDelta) -> ToolCallPiece:
    function = FunctionPiece(arguments=piece.arguments)
    if piece.id is None or piece.name is None:
        return ToolCallPiece(index=piece.index, function=function)
    function.name = piece.name
    return ToolCallPiece(index=piece.index, id=piece.id, type="function", function=function)
