"""Checks messages as clients send them, and brings them into the forms that templates read."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError

Messages = Sequence[dict[str, Any]]
_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
_TEXTS = ("text", "input_text", "output_text")


def has_calls(messages: object) -> bool:
    """Whether any message holds tool calls, or the result of one."""
    every = messages if isinstance(messages, (list, tuple)) else ()
    return any(
        isinstance(message, dict) and (message.get("tool_calls") or message.get("role") == "tool")
        for message in every
    )


def with_parsed_arguments(messages: Any) -> Any:
    """Return messages with the arguments of tool calls as objects, which most templates expect.

    OpenAI's API sends them as JSON text. Text that is no JSON object is left as it is. A tool
    message without a name gets the name of the call that its `tool_call_id` refers to.
    """
    if not isinstance(messages, (list, tuple)):
        return messages
    names: dict[Any, Any] = {}
    changed = []
    for message in messages:
        message = _with_arguments(message, _as_object)
        for call in _calls(message):
            names[call.get("id")] = _function(call).get("name")
        changed.append(_with_name(message, names))
    return changed


def with_text_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with the arguments of tool calls as JSON text, and a content beside calls.

    Some templates (DeepSeek's) concatenate both to strings.
    """
    changed = [_with_arguments(message, _as_text) for message in messages]
    return [{**m, "content": ""} if _calls(m) and m.get("content") is None else m for m in changed]


def with_object_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with all arguments of tool calls as objects: {"arguments": text} for text.

    Templates that write each argument by itself cannot write text that is no JSON object.
    """
    return [_with_arguments(message, _as_wrapped) for message in messages]


def _with_arguments(message: Any, change: Callable[[Any], Any]) -> Any:
    calls = _calls(message)
    if not calls:
        return message
    return {**message, "tool_calls": [_changed(call, change) for call in calls]}


def _changed(call: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = _function(call)
    if "arguments" not in function:
        return call
    new = {**function, "arguments": change(function["arguments"])}
    return {**call, "function": new} if function is not call else new


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_wrapped(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_name(message: Any, names: Mapping[Any, Any]) -> Any:
    if not isinstance(message, dict) or message.get("role") != "tool" or message.get("name"):
        return message
    identity = message.get("tool_call_id")
    name = names.get(identity) if isinstance(identity, str) else None
    return message if name is None else {**message, "name": name}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the `function` object of a call; some clients send it without the enclosing object."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _calls(message: Any) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return _dicts(calls) if calls else []


def _dicts(values: Any) -> list[dict[str, Any]]:
    sequence = values if isinstance(values, (list, tuple)) else ()
    return [value for value in sequence if isinstance(value, dict)]


def text_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages with their contents as text; several text parts are joined by newlines.

    Raises:
        InvalidRequestError: this is no list of messages, or a part of one is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _wrong(f"messages is {_short(messages)}; expected a list such as {_EXAMPLE}.")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong(f"{path} is {_short(message)}; expected one such as {_EXAMPLE[1:-1]}.")
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise _wrong(f"{path} has no content; give it a text.")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(f"{path}.content is {_short(content)}; expected a text.")
    parts = [_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": "\n".join(parts)}


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(f'{path} is {_short(part)}; expected {{"type": "text", "text": ...}}.')
    if part.get("type") not in _TEXTS:
        raise _wrong(f"{path} is of type {_short(part.get('type'))}; models here read text only.")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{path}.text is {_short(part.get('text'))}; expected a text.")
    text: str = part["text"]
    return text


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
