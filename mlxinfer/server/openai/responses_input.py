"""Input items of the responses API, converted to messages and tools of chat templates."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import InvalidRequestError
from ..errors import UnsupportedFieldError
from ..fields.tools import call_arguments
from .declared_tools import INPUT, DeclaredTools, shown_name
from .responses_types import InputItem, InputPart, ResponsesRequest

Plain = dict[str, Any]
HOSTED_ITEMS = frozenset(  # of tools that are skipped
    f"{tool}_{kind}"
    for tool in (
        *("web_search", "file_search", "computer", "code_interpreter", "image_generation", "mcp"),
        *("local_shell", "shell", "apply_patch", "tool_search", "program"),
    )
    for kind in ("call", "call_output", "output")
) | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program"}
_TEXTS = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text"))


def items_of(body: ResponsesRequest) -> list[InputItem]:
    """The items of a request; a text is a user's message."""
    if isinstance(body.input, str):
        return [InputItem(role="user", content=body.input)]
    return body.input


def conversation(
    body: ResponsesRequest, before: Sequence[InputItem], tools: DeclaredTools, *, source: str
) -> list[Plain]:
    """Instructions and items as messages; reasoning, text and calls of one turn are one message.

    Args:
        body: the request.
        before: items of the responses that it follows.
        tools: of the request; notes the items that are skipped.
        source: of the chat template. A developer's message becomes a system message if the template
            does not know the role.

    Raises:
        InvalidRequestError: no input, or an incomplete item.
        UnsupportedFieldError: an item or a part of a type that is not supported.
    """
    found: list[Plain] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    items = items_of(body)
    if not items and not before:
        raise InvalidRequestError(
            "input is missing or empty; send a text or an item.", param="input"
        )
    for number, item in enumerate([*before, *items], start=-len(before)):
        place = "previous_response_id" if number < 0 else f"input[{number}]"
        if item.type in HOSTED_ITEMS:
            tools.skipped.add(place, item.type)
        else:
            _add(found, item, place, source)
    if len(found) == bool(body.instructions):
        raise InvalidRequestError("input has no item that can be used here.", param="input")
    for message in found:
        message.setdefault("content", "")
    return found


def _add(found: list[Plain], item: InputItem, path: str, source: str) -> None:
    if item.type == "message":
        _add_message(found, item, path, source)
    elif item.type in ("function_call", "custom_tool_call"):
        _turn(found, "tool_calls").setdefault("tool_calls", []).append(_call(item, path))
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        if item.call_id is None:
            raise InvalidRequestError(f"{path} has no call_id or no output.", param=path)
        text = _text(_output(item, path), f"{path}.output")
        found.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    elif item.type == "reasoning":
        _turn(found, "reasoning_content")["reasoning_content"] = _thoughts(item, path)
    else:
        raise UnsupportedFieldError(
            f"{path} is of type {item.type[:50]!r}, which is not supported.", param=f"{path}.type"
        )


def _add_message(found: list[Plain], item: InputItem, path: str, source: str) -> None:
    if item.role is None or item.content is None:
        raise InvalidRequestError(f"{path} has no role or no content.", param=path)
    text = _text(item.content, f"{path}.content")
    if item.role == "assistant":
        _turn(found, "content")["content"] = text
        return
    role = "system" if item.role == "developer" and "developer" not in source else item.role
    found.append({"role": role, "content": text})


def _turn(found: list[Plain], key: str) -> Plain:
    """The assistant's message that a key belongs to: the last message or a new one."""
    last = found[-1] if found else {}
    follows = {"reasoning_content": (), "content": ("reasoning_content",)}
    before = follows.get(key, ("reasoning_content", "content", "tool_calls"))
    if last.get("role") == "assistant" and set(last) - {"role"} <= set(before):
        return last
    found.append({"role": "assistant"})
    return found[-1]


def _call(item: InputItem, path: str) -> Plain:
    if item.call_id is None or item.name is None:
        raise InvalidRequestError(f"{path} has no call_id or no name.", param=path)
    custom = item.type == "custom_tool_call"
    given = item.input if custom else item.arguments
    if not isinstance(given, str | None):
        place = f"{path}.{'input' if custom else 'arguments'}"
        raise InvalidRequestError(f"{place} is no text.", param=place)
    arguments: Plain | str = {INPUT: given or ""} if custom else call_arguments(given)
    function = {"name": shown_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _output(item: InputItem, path: str) -> str | list[InputPart]:
    """The output of a call; a tool that says nothing may send null."""
    try:
        return msgspec.convert(item.output or "", str | list[InputPart])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{path}.output: {error}.", param=f"{path}.output") from None


def _thoughts(item: InputItem, path: str) -> str:
    """The reasoning of an earlier answer, as text or in our `encrypted_content`."""
    if item.content:
        return _text(item.content, f"{path}.content")
    if item.encrypted_content is None:
        return _text(item.summary or "", f"{path}.summary")
    return _unwrapped(item.encrypted_content, path)


def _unwrapped(content: str | None, path: str) -> str:
    try:
        return base64.b64decode(content or "", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        raise InvalidRequestError(
            f"{path}.encrypted_content is not of this server; leave the item out.", param=path
        ) from None


def encrypted_content(text: str) -> str:
    """Reasoning or a summary in base64 for clients that send it back unread; it is no secret."""
    return base64.b64encode(text.encode()).decode()


def _text(content: str | list[InputPart], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_part(part, f"{path}[{i}]") for i, part in enumerate(content)])


def _part(part: InputPart, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXTS and part.type != "refusal":
        raise UnsupportedFieldError(
            f"{path} is of type {part.type[:50]!r}; this model reads text only.",
            param=f"{path}.type",
        )
    if text is None:
        raise InvalidRequestError(f"{path}.text is missing.", param=f"{path}.text")
    return text
