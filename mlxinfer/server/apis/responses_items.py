"""Items of the responses API: those of a request as messages, those of an answer as they grow."""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...errors import InvalidRequestError, UnsupportedFieldError
from ...outputs import CallStatus, Part, ReasoningPart, TextPart, ToolCallDelta
from ..http import Plain, named
from .documents import PdfPart, SentFile
from .tools import (
    INPUT,
    DeclaredTool,
    call_arguments,
    custom_input,
    function_call,
    newest_turn,
    part_text,
    read_content,
    shown_name,
    skip,
    text_part,
    url_part,
)

HOSTED_ITEMS = frozenset(  # of tools that are skipped
    f"{tool}_{kind}"
    for tool in (
        "web_search", "file_search", "computer", "code_interpreter", "image_generation", "mcp",
        "local_shell", "shell", "apply_patch", "tool_search", "program",
    )
    for kind in ("call", "call_output", "output")
) | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program"}  # fmt: skip
OUTPUTS = ("function_call_output", "custom_tool_call_output")
KNOWN_ITEMS = ("message", "function_call", "custom_tool_call", "reasoning", *OUTPUTS)
Status = Literal["in_progress", "completed", "incomplete"]


# -- a request's items --------------------------------------------------------------------------


class InputPart(SentFile, kw_only=True, omit_defaults=True):
    """A part of a message or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


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


def conversation(
    instructions: str | None,
    before: Sequence[InputItem],
    items: Sequence[InputItem],
    skipped: list[str],
) -> list[Plain]:
    """Instructions and items as messages; reasoning, text and calls of one turn are one message.

    Args:
        before: items of the responses that the request follows.
        skipped: gets the items and earlier parts that are left out.
    """
    if not items and not before:
        raise InvalidRequestError.of("input", "is missing or empty; send a text or an item.")
    messages: list[Plain] = [{"role": "system", "content": instructions}] if instructions else []
    places = [f"previous_response_id[{number}]" for number in range(len(before))]
    places += [f"input[{number}]" for number in range(len(items))]
    newest = len(before) + _newest(items)
    for number, (item, place) in enumerate(zip([*before, *items], places, strict=True)):
        if item.type in HOSTED_ITEMS or _is_foreign(item, newest=number == len(places) - 1):
            skip(skipped, place, item.type)
        else:
            _add(messages, item, place, skipped if number < newest else None)
    if len(messages) == bool(instructions):
        raise InvalidRequestError.of("input", "has no item that can be used here.")
    for message in messages:
        message.setdefault("content", "")
    return messages


def _newest(items: Sequence[InputItem]) -> int:
    tools = dict.fromkeys(OUTPUTS, "tool")
    return newest_turn(
        [
            item.role or "" if item.type == "message" else tools.get(item.type, "assistant")
            for item in items
        ]
    )


def _is_foreign(item: InputItem, *, newest: bool) -> bool:
    """Whether only another server can read an item: it encrypted it, or has invented its type.

    An unknown item that was sent just now is an error, and one of earlier turns is left out, since
    no client could go on with its conversation otherwise.
    """
    if item.type == "reasoning":
        return not item.content and not item.summary and _unwrapped(item.encrypted_content) is None
    return item.type == "compaction" or (not newest and item.type not in KNOWN_ITEMS)


def _unwrapped(encrypted: str | None) -> str | None:
    """The reasoning in our own `encrypted_content`, "" if there is none; None: another server's."""
    try:
        return base64.b64decode(encrypted or "", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None


def _add(messages: list[Plain], item: InputItem, path: str, notes: list[str] | None) -> None:
    if item.type == "message":
        if item.role is None or item.content is None:
            raise InvalidRequestError.of(path, "has no role or no content.")
        content = read_content(item.content, _part, f"{path}.content", notes)
        if item.role == "assistant":
            _turn(messages, "content")["content"] = content
        else:
            messages.append({"role": item.role, "content": content})
    elif item.type in ("function_call", "custom_tool_call"):
        _turn(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item, path))
    elif item.type in OUTPUTS:
        if item.call_id is None:
            raise InvalidRequestError.of(path, "has no call_id or no output.")
        content = read_content(_output(item, path), _part, f"{path}.output", notes)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif item.type == "reasoning":
        _turn(messages, "reasoning_content")["reasoning_content"] = _thoughts(item, path)
    else:
        raise UnsupportedFieldError(
            f"{path} is of type {item.type[:50]!r}, which is not supported.", param=f"{path}.type"
        )


def _turn(messages: list[Plain], key: str) -> Plain:
    last = messages[-1] if messages else {}
    follows = {"reasoning_content": (), "content": ("reasoning_content",)}
    before = follows.get(key, ("reasoning_content", "content", "tool_calls"))
    if last.get("role") == "assistant" and set(last) - {"role"} <= set(before):
        return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _call(item: InputItem, path: str) -> Plain:
    if item.call_id is None or item.name is None:
        raise InvalidRequestError.of(path, "has no call_id or no name.")
    custom = item.type == "custom_tool_call"
    given = item.input if custom else item.arguments
    if not isinstance(given, str | None):
        place = f"{path}.{'input' if custom else 'arguments'}"
        raise InvalidRequestError.of(place, "is no text.")
    arguments: Plain | str = {INPUT: given or ""} if custom else call_arguments(given)
    return function_call(item.call_id, shown_name(item.name, item.namespace), arguments)


def _output(item: InputItem, path: str) -> str | list[InputPart]:
    try:
        return msgspec.convert(item.output or "", str | list[InputPart])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{path}.output: {error}.", param=f"{path}.output") from None


def _thoughts(item: InputItem, path: str) -> str:
    """The reasoning of an earlier answer, as text or in our `encrypted_content`."""
    if item.content:
        return _text(item.content, f"{path}.content")
    thoughts = _unwrapped(item.encrypted_content)
    return thoughts or _text(item.summary or "", f"{path}.summary")


def _text(content: str | list[InputPart], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part_text(part.type, part.text, path) for part in content])


def _part(part: InputPart, path: str) -> Plain:
    if part.type == "input_image":
        return url_part(part.image_url, part.detail, f"{path}.image_url")
    if part.type == "input_file":
        return text_part(part.shown(path))
    said = part.refusal if part.type == "refusal" else part.text
    return text_part(part_text(part.type, said, path))


def pdfs_of(items: Sequence[InputItem]) -> Iterator[PdfPart]:
    newest = _newest(items)
    for number, item in enumerate(items):
        for part, place in _parts(item, f"input[{number}]"):
            yield from part.pdfs(place, is_earlier=number < newest)


def _parts(item: InputItem, path: str) -> Iterator[tuple[InputPart, str]]:
    name, content = "content", item.content
    if item.type in OUTPUTS:
        name, content = "output", _output(item, path)
        item.output = content
    for number, part in enumerate([] if isinstance(content, str) else content or ()):
        yield part, f"{path}.{name}[{number}]"


# -- an answer's items --------------------------------------------------------------------------


class OutputItems:
    """The items of one answer as they grow, one open at a time.

    `push` yields the events, which an answer without a stream drops. `done` has the ended items; a
    call that the end of the answer cut off is incomplete, and a broken one is text instead.

    Args:
        answer_id: part of the items' ids.
        wrap: reasoning items also carry `encrypted_content`: base64 for clients that send it back
            unread; it is no secret.
        declared: tools that the client declared under other names than the model sees.
    """

    def __init__(self, answer_id: str, *, wrap: bool, declared: Mapping[str, DeclaredTool]) -> None:
        self.done: list[Plain] = []
        self._answer_id = answer_id
        self._wrap = wrap
        self._declared = declared
        self._number = 0  # of the next event
        self._open: Plain | None = None
        self._texts: list[str] = []
        self._index = -1
        self._broken = False  # the open item is a call that turned out to be text
        self._item_id: str = ""
        self._scores: list[Plain] = []  # of the open message
        self._pending: list[Plain] = []  # of tokens without text so far

    def frame(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named(kind, event)

    def push(self, parts: Sequence[Part], scored: Sequence[Plain] = ()) -> Iterator[bytes]:
        """Add parts; yield their events.

        Args:
            parts: that a step has brought; none while its text is held back.
            scored: its token, where log-probabilities were asked for. It belongs to the text that
                comes next; tokens of reasoning, of calls and of marks are left out.
        """
        self._pending += scored
        if not parts and self._is_open("reasoning"):
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
        item = self._open
        if item is None:
            return
        self._open = None
        whole = "".join(self._texts)
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(whole)
            if item["input"]:
                yield self._event("custom_tool_call_input.delta", delta=item["input"])
            yield self._event("custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "function_call":
            item |= {"arguments": whole, "status": status}
            yield self._event("function_call_arguments.done", name=item["name"], arguments=whole)
        else:
            yield from self._close_text(item, whole, status)
        yield self.frame("response.output_item.done", output_index=self._index, item=item)
        if self._broken:
            self._broken = False
        else:
            self.done.append(item)

    def _close_text(self, item: Plain, whole: str, status: Status) -> Iterator[bytes]:
        kind, rest = "reasoning_text", {}
        if item["type"] == "message":
            self._scores += self._pending
            self._pending = []
            kind, rest = "output_text", {"logprobs": self._scores}
        elif self._wrap:
            item["encrypted_content"] = base64.b64encode(whole.encode()).decode()
        content = _content(kind, whole) | rest
        item |= {"content": [content], "status": status}
        yield self._event(f"{kind}.done", content_index=0, text=whole, **rest)
        yield self._event("content_part.done", content_index=0, part=content)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _text(self, text: str) -> Iterator[bytes]:
        if not self._is_open("message"):
            empty = {"role": "assistant", "status": "in_progress", "content": []}
            yield from self._begin("message", "msg", empty, _content("output_text", ""))
        self._texts.append(text)
        scores, self._pending = self._pending, []
        self._scores += scores
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _reasoning(self, text: str) -> Iterator[bytes]:
        if not self._is_open("reasoning"):
            empty: Plain = {"status": "in_progress", "summary": [], "content": []}
            yield from self._begin("reasoning", "rs", empty, _content("reasoning_text", ""))
        self._texts.append(text)
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _call(self, piece: ToolCallDelta) -> Iterator[bytes]:
        if piece.id is not None and piece.name is not None:
            yield from self._begin_call(piece.id, piece.name)
        if piece.arguments:
            self._texts.append(piece.arguments)
            if self._is_open("function_call"):  # a custom tool's input is known at the end
                yield self._event("function_call_arguments.delta", delta=piece.arguments)
        if piece.status is not CallStatus.OPEN:
            self._broken = piece.status is CallStatus.BROKEN
            yield from self.close("completed" if piece.status is CallStatus.DONE else "incomplete")

    def _begin_call(self, call_id: str, name: str) -> Iterator[bytes]:
        tool = self._declared.get(name, DeclaredTool(name))
        names: Plain = {"call_id": call_id, "name": tool.name}
        if tool.namespace:
            names["namespace"] = tool.namespace
        if tool.custom:
            return self._begin("custom_tool_call", "ctc", {"input": "", **names})
        empty = {"status": "in_progress", "arguments": "", **names}
        return self._begin("function_call", "fc", empty)

    def _begin(
        self, kind: str, prefix: str, fields: Plain, content: Plain | None = None
    ) -> Iterator[bytes]:
        yield from self.close("completed")
        self._index += 1
        self._item_id = f"{prefix}_{self._answer_id}_{self._index + 1}"
        self._open, self._texts = {"type": kind, "id": self._item_id, **fields}, []
        self._scores = []
        yield self.frame("response.output_item.added", output_index=self._index, item=self._open)
        if content is not None:
            yield self._event("content_part.added", content_index=0, part=content)

    def _event(self, kind: str, **fields: Any) -> bytes:
        place = {"output_index": self._index, "item_id": self._item_id}
        return self.frame(f"response.{kind}", **place, **fields)


def _content(kind: str, text: str) -> Plain:
    rest: Plain = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **rest}
