"""Chat messages as users send them, and as chat templates want them.

`text_messages` checks OpenAI's form and reduces it to text. The other functions do what
transformers does around a rendering: plain data, reasoning fields, tool-call arguments as objects
or as text, and the tag at which a continued message is cut off.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError, TemplateError, shown
from .marked_text import without_marks

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag, at which the rendering is cut
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


Messages = Sequence[dict[str, Any]]
_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
_TEXTS = ("text", "input_text", "output_text")


def plain_data(value: Any) -> Any:
    """Return a copy that holds only None, bool, int, float, str, list, tuple and dict.

    Any other object (an image, an array) becomes a string with the name of its type, so that a
    template finds no methods on it. Dataclasses become dicts.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, or the like
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_data(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain_data(getattr(value, field.name)) for field in fields}
    return f"<{type(value).__name__}>"


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as a list; raise TemplateError unless they are one or more objects."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("messages is empty or no list; expected at least one message.")
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError(f"A message is {shown(message)}; expected an object with a role.")
    return list(messages)


def without_none(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without keys whose value is None: templates test for missing keys."""
    return {key: value for key, value in message.items() if value is not None}


def with_reasoning_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under every name that templates read."""
    found = [message[key] for key in _REASONING_FIELDS if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def insert_continue_tag(
    chat: list[dict[str, Any]], wanted: bool | str, add_generation_prompt: bool, source: str
) -> str | None:
    """Append the tag to the text that the answer continues; return that text, None without one.

    Changes the last message in `chat`. `wanted` is True or the name of the field to continue.
    """
    if not wanted:
        return None
    if add_generation_prompt:
        raise TemplateError(
            "continue_final_message and add_generation_prompt exclude each other: the first goes "
            "on with the last message, the second begins a new one."
        )
    name = wanted if isinstance(wanted, str) else "content"
    value = chat[-1].get(name)
    if value is None:
        raise TemplateError(f"continue_final_message: the last message has no {name}.")
    names = [name]
    if name in _REASONING_FIELDS:
        names = [n for n in _REASONING_FIELDS if chat[-1].get(n) == value]
    if not any(n in source for n in names):
        raise TemplateError(f"continue_final_message: the chat template never reads {name}.")
    if isinstance(value, str):
        chat[-1].update(dict.fromkeys(names, value + _CONTINUE))
        return value
    for part in reversed(value):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] += _CONTINUE
            return text
    raise TemplateError("continue_final_message: the last message has no text to go on with.")


def cut_at_continue_tag(rendered: str, text: str, marks: str = "") -> str:
    """Return the rendering up to the end of `text`; keep its trailing spaces if the template did.

    The template may have moved `marks` within the text; it still counts as the same text.
    """
    end = rendered.rfind(_CONTINUE.strip())
    if end < 0 or without_marks(text, marks).strip() not in without_marks(rendered, marks):
        raise TemplateError(
            "continue_final_message: the chat template does not write the last message as it is."
        )
    kept = rendered.startswith(_CONTINUE, end)
    return rendered[:end] if kept else rendered[:end].rstrip()


def has_calls(messages: object) -> bool:
    """Whether any message holds tool calls."""
    return any(_calls(message) for message in _dicts(messages))


def with_parsed_arguments(messages: Any) -> Any:
    """Return messages whose tool calls have arguments as objects, which most templates expect.

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
    """Return messages whose tool calls have JSON text as arguments, and a content beside them.

    Some templates (DeepSeek's) concatenate both to strings.
    """
    changed = [_with_arguments(message, _as_text) for message in messages]
    return [{**m, "content": ""} if _calls(m) and m.get("content") is None else m for m in changed]


def with_object_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages whose tool calls all have objects as arguments: {"arguments": text} for text.

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
    return _dicts(calls)


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
