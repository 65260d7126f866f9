"""Arguments of tool calls: of earlier answers as templates read them, and of calls cut off."""

from contextlib import suppress
from typing import Any

import msgspec


def call_arguments(text: str | None) -> dict[str, Any] | str:
    """The arguments of a call in a conversation as an object; as text if they are no object.

    max_tokens may have cut them off, and not every model writes JSON.
    """
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text or ""


def begun_object(text: str) -> dict[str, Any]:
    """A JSON object that may be cut off: its whole members, and a string that was begun."""
    closers: list[str] = []
    in_string = escaped = False
    whole = ("", "")  # the text up to the last whole member, and what closes it
    for index, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            whole = (text[: index + 1], "".join(reversed(closers)))
        elif char in "}]" and closers:
            closers.pop()
        elif char == ",":
            whole = (text[:index], "".join(reversed(closers)))
    closed = text + '"' * in_string + "".join(reversed(closers))
    for candidate in (closed, "".join(whole)):
        with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            return msgspec.json.decode(candidate, type=dict[str, Any])
    return {}
