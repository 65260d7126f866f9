"""Output items of the responses API, and the stream events that build them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from ...outputs import CallStatus, Part, ReasoningPart, TextPart, ToolCallDelta
from ..http import sse
from .declared_tools import DeclaredTool, custom_input
from .logprobs import TokenLogprob
from .responses_input import encrypted_content
from .responses_types import (
    CallItem,
    CustomCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)


class EventFrames:
    """Makes frames of named events with consecutive sequence numbers."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        """The frame of one event."""
        event = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return sse.named(kind, event)


class OutputItems:
    """The items of one answer as they grow, one open at a time.

    `push` yields the events, which an answer without a stream drops. `done` has the ended items; a
    call that the end of the answer cut off is incomplete, and a broken one is text instead.

    Args:
        answer_id: part of the items' ids.
        wrap: reasoning items also carry `encrypted_content`.
        declared: tools that the client declared under other names than the model sees.
    """

    def __init__(self, answer_id: str, *, wrap: bool, declared: Mapping[str, DeclaredTool]) -> None:
        self.done: list[Item] = []
        self.frame = EventFrames()
        self._answer_id = answer_id
        self._wrap = wrap
        self._declared = declared
        self._open: Item | None = None
        self._texts: list[str] = []
        self._index = -1
        self._broken = False  # the open item is a call that turned out to be text
        self._item_id = ""
        self._scores: list[TokenLogprob] = []  # of the open message
        self._pending: list[TokenLogprob] = []  # of tokens without text so far

    def push(self, parts: Sequence[Part], scored: Sequence[TokenLogprob] = ()) -> Iterator[bytes]:
        """Add parts; yield their events.

        Args:
            parts: that a step has brought; none while its text is held back.
            scored: its token, where log-probabilities were asked for. It belongs to the text that
                comes next; tokens of reasoning, of calls and of marks are left out.
        """
        self._pending += scored
        if not parts and isinstance(self._open, ReasoningItem):
            self._pending.clear()
        for part in parts:
            if isinstance(part, TextPart):
                yield from self._text(part.text)
                continue
            self._pending.clear()
            if isinstance(part, ReasoningPart):
                yield from self._reasoning(part.text)
            else:
                yield from self._call(part)

    def close(self, status: Status) -> Iterator[bytes]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return
        self._open = None
        whole = "".join(self._texts)
        if isinstance(item, CustomCallItem):
            item = replace(item, input=custom_input(whole))
            if item.input:
                yield self._event("custom_tool_call_input.delta", delta=item.input)
            yield self._event("custom_tool_call_input.done", input=item.input)
        elif isinstance(item, CallItem):
            item = replace(item, arguments=whole, status=status)
            yield self._event("function_call_arguments.done", arguments=whole)
        else:
            content: Any = _content(item, whole)
            if isinstance(item, MessageItem):
                self._scores += self._pending
                self._pending = []
                content.logprobs = self._scores
            item = replace(item, content=[content], status=status)
            if isinstance(item, ReasoningItem) and self._wrap:
                item.encrypted_content = encrypted_content(whole)
            rest: dict[str, Any] = {}
            if isinstance(item, MessageItem):
                rest["logprobs"] = self._scores
            yield self._event(f"{_NAMES[type(item)]}.done", content_index=0, text=whole, **rest)
            yield self._event("content_part.done", content_index=0, part=content)
        yield self.frame("response.output_item.done", output_index=self._index, item=item)
        if self._broken:
            self._broken = False
        else:
            self.done.append(item)

    def _text(self, text: str) -> Iterator[bytes]:
        if not isinstance(self._open, MessageItem):
            empty = MessageItem(id=self._make_id("msg"), status="in_progress", content=[])
            yield from self._begin(empty)
        self._texts.append(text)
        scores, self._pending = self._pending, []
        self._scores += scores
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _reasoning(self, text: str) -> Iterator[bytes]:
        if not isinstance(self._open, ReasoningItem):
            empty = ReasoningItem(id=self._make_id("rs"), status="in_progress", content=[])
            yield from self._begin(empty)
        self._texts.append(text)
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _call(self, piece: ToolCallDelta) -> Iterator[bytes]:
        if piece.id is not None and piece.name is not None:
            yield from self._begin(self._call_item(piece.id, piece.name))
        if piece.arguments:
            self._texts.append(piece.arguments)
            if isinstance(self._open, CallItem):  # a custom tool's input is known at the end
                yield self._event("function_call_arguments.delta", delta=piece.arguments)
        if piece.status is not CallStatus.OPEN:
            self._broken = piece.status is CallStatus.BROKEN
            yield from self.close("completed" if piece.status is CallStatus.DONE else "incomplete")

    def _make_id(self, prefix: str) -> str:
        return f"{prefix}_{self._answer_id}_{self._index + 2}"

    def _call_item(self, call_id: str, name: str) -> CallItem | CustomCallItem:
        """An item without arguments, under the names that the client has declared."""
        tool = self._declared.get(name, DeclaredTool(name))
        names: dict[str, Any] = {"call_id": call_id, "name": tool.name}
        names["namespace"] = tool.namespace or UNSET
        if tool.custom:
            return CustomCallItem(id=self._make_id("ctc"), input="", **names)
        return CallItem(id=self._make_id("fc"), status="in_progress", arguments="", **names)

    def _begin(self, item: Item) -> Iterator[bytes]:
        yield from self.close("completed")
        self._open, self._texts, self._item_id = item, [], item.id
        self._scores = []
        self._index += 1
        yield self.frame("response.output_item.added", output_index=self._index, item=item)
        if isinstance(item, MessageItem | ReasoningItem):
            yield self._event("content_part.added", content_index=0, part=_content(item, ""))

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event of the item that was opened last."""
        place = {"output_index": self._index, "item_id": self._item_id}
        return self.frame(f"response.{kind}", **place, **fields)


_NAMES: dict[type, str] = {MessageItem: "output_text", ReasoningItem: "reasoning_text"}


def _content(item: Item, text: str) -> OutputText | ReasoningText:
    return OutputText(text=text) if isinstance(item, MessageItem) else ReasoningText(text=text)
