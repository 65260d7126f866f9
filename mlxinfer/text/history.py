"""Tool calls of earlier turns, as chat templates want them. Knows messages; no jinja."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]


def has_calls(messages: object) -> bool:
    """Whether a message brings tool calls."""
    return any(_calls(message) for message in _dicts(messages))


def with_objects(messages: Any) -> Any:
    """Return messages whose tool calls have arguments as objects, which most templates expect.

    OpenAI's API has them as JSON text. What is no JSON object stays as it is. Tool messages get the
    name of the tool whose call they answer, where they tell the call and not the name.
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


def in_text(messages: Messages) -> list[dict[str, Any]]:
    """Return messages whose tool calls have arguments as JSON text, and some content beside them.

    Some templates (DeepSeek's) append both to strings.
    """
    changed = [_with_arguments(message, _as_text) for message in messages]
    return [{**m, "content": ""} if _calls(m) and m.get("content") is None else m for m in changed]


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


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_name(message: Any, names: Mapping[Any, Any]) -> Any:
    if not isinstance(message, dict) or message.get("role") != "tool" or message.get("name"):
        return message
    identity = message.get("tool_call_id")
    name = names.get(identity) if isinstance(identity, str) else None
    return message if name is None else {**message, "name": name}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """The function of a call, which some clients send without its frame."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _calls(message: Any) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return _dicts(calls)


def _dicts(values: Any) -> list[dict[str, Any]]:
    sequence = values if isinstance(values, (list, tuple)) else ()
    return [value for value in sequence if isinstance(value, dict)]
