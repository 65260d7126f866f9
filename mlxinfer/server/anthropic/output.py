"""Answers as Anthropic's messages API shows them: blocks, reasons, counts. Knows no requests."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from ...answer import Answer
from ...core import FinishReason
from ...parts import (
    CallStatus,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallDelta,
)
from ...results import Result
from ..http import sse


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Visible text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """What the model thought; the signature is a formality, nothing checks it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Token counts; the prompt's are divided into read from the cache and computed."""

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


def blocks_of(
    parts: Iterable[Part], calls: Iterable[ToolCall], *, signature: str, thoughts: bool
) -> list[Any]:
    """The content of a whole answer, in the order in which it came; broken calls are text.

    Args:
        parts: of the answer, neighbours joined.
        calls: the complete ones.
        signature: of blocks of thinking.
        thoughts: whether these show what was thought.
    """
    whole = {call.id: call for call in calls}
    found: list[Any] = []
    for part in parts:
        if isinstance(part, TextPart):
            found.append(TextBlock(text=part.text))
        elif isinstance(part, ReasoningPart):
            shown = part.text if thoughts else ""
            found.append(ThinkingBlock(thinking=shown, signature=signature))
        elif part.id in whole:
            call = whole[part.id]
            given = msgspec.json.decode(call.arguments)
            found.append(ToolUseBlock(id=call.id, name=call.name, input=given))
    return found


def usage_of_result(result: Result) -> AnthropicUsage:
    """The counts of a finished answer."""
    return AnthropicUsage(
        input_tokens=result.prompt_tokens - result.cached_tokens,
        output_tokens=len(result.token_ids),
        cache_read_input_tokens=result.cached_tokens,
    )


def stop_reason(answer: Answer, result: Result, *, clipped: bool) -> str:
    """Why an answer ended; `clipped`: the context had less room than max_tokens."""
    if result.finish_reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if clipped else "max_tokens"
    if answer.stop_match is not None:
        return "stop_sequence"
    return "tool_use" if result.tool_calls else "end_turn"


class BlockEvents:
    """Parts as they come -> events of content blocks, one block open at a time.

    Args: as of blocks_of.
    """

    def __init__(self, *, signature: str, thoughts: bool) -> None:
        self._signature, self._thoughts = signature, thoughts
        self._index = -1
        self._open: str | None = None  # the type of the open block

    def push(self, parts: Iterable[Part]) -> Iterator[bytes]:
        """The events of these parts."""
        for part in parts:
            if isinstance(part, TextPart):
                yield from self._within("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part.text})
            elif isinstance(part, ReasoningPart):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._within("thinking", empty)
                if self._thoughts:
                    yield self._delta({"type": "thinking_delta", "thinking": part.text})
            else:
                yield from self._call(part)

    def close(self) -> Iterator[bytes]:
        """The end of the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        yield sse.named("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _call(self, piece: ToolCallDelta) -> Iterator[bytes]:
        if piece.id is not None:
            yield from self.close()
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": piece.id,
                "name": piece.name,
                "input": {},
            }
            yield from self._within("tool_use", block)
        if piece.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.status is not CallStatus.OPEN:
            yield from self.close()

    def _within(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """The events that lead into a block of this kind."""
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._index += 1
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield sse.named("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse.named("content_block_delta", event)
