"""Tools in requests, whichever API they came by: what is declared, and calls in conversations.

Hosted tools, such as a search, have nothing here that would run them: they are left out of a
request, and named in a header and the log.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ...errors import InvalidRequestError
from ...text import ToolUse
from ..registry.served import ServedModel
from .checks import MAX_DEPTH, check_json_size

MAX_TOOLS = 512
HEADER = b"x-mlxinfer-skipped"
MAX_SHOWN = 16
_KIND = re.compile(r"[a-z0-9_]{1,40}")


def tool_use(
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None = None,
) -> ToolUse | None:
    """How a request uses tools; None: not at all.

    Raises:
        InvalidRequestError: a tool or the choice is wrong.
        TemplateError: the model's template knows no tools.
    """
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{len(tools)} tools; at most {MAX_TOOLS} are accepted.", param="tools"
        )
    check_json_size(tools, param="tools", max_depth=MAX_DEPTH)
    check_json_size(choice, param="tool_choice", max_depth=MAX_DEPTH)
    return model.builder.tool_use(tools, choice, parallel=parallel is not False)


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


class Skipped:
    """Hosted tools of a request and their items in its history, which are left out."""

    def __init__(self) -> None:
        self._entries: list[str] = []

    def add(self, place: str, kind: object) -> None:
        """Note that the item or tool at `place` is left out; an odd `kind` is not repeated."""
        text = str(kind)
        self._entries.append(f"{place} {text if _KIND.fullmatch(text) else 'unknown'}")

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __str__(self) -> str:
        return ", ".join(self._entries)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response header that names what was left out, if anything was."""
        if not self._entries:
            return []
        shown = self._entries[:MAX_SHOWN]
        more = len(self._entries) - len(shown)
        text = ", ".join([*shown, *([f"{more} more"] if more else [])])
        return [(HEADER, text.encode())]
