"""Messages as templates get them, and the place where one is continued. Knows no jinja.

Follows what transformers does before and after it renders.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import TemplateError, shown
from .overlook import without

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # the mark that transformers appends, and cuts at
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def plain_data(value: Any) -> Any:
    """Return a copy made of None, bool, int, float, str, list, tuple and dict only.

    Whatever else is in there (images, arrays) becomes a string with the name of its type, so that a
    template gets no methods to call. Dataclasses become dicts.
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


def checked(messages: Any) -> list[dict[str, Any]]:
    """Return the messages; raise TemplateError unless they are a list of objects, and not empty."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("messages is empty or no list; expected at least one message.")
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError(f"A message is {shown(message)}; expected an object with a role.")
    return list(messages)


def without_none(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without keys whose value is None: templates handle missing keys better."""
    return {key: value for key, value in message.items() if value is not None}


def with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Offer the reasoning under the names that templates read, whichever one it came under."""
    found = [message[key] for key in _REASONING_FIELDS if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def mark_end(
    chat: list[dict[str, Any]], wanted: bool | str, add_generation_prompt: bool, source: str
) -> str | None:
    """Append the mark to the text that is to be continued; return that text, None if none is."""
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


def cut_at_mark(rendered: str, text: str, marks: str = "") -> str:
    """Return the rendering up to the end of `text`, its trailing spaces kept if they were.

    Where the template has moved `marks` within the text, it is the same text still.
    """
    end = rendered.rfind(_CONTINUE.strip())
    if end < 0 or without(text, marks).strip() not in without(rendered, marks):
        raise TemplateError(
            "continue_final_message: the chat template does not write the last message as it is."
        )
    kept = rendered.startswith(_CONTINUE, end)
    return rendered[:end] if kept else rendered[:end].rstrip()
