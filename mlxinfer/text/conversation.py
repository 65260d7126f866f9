"""Conversations as people write them, checked: OpenAI's messages, text only. Knows no template."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError

_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
_TEXTS = ("text", "input_text", "output_text")


def text_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with their contents as text; parts of a text are joined by newlines.

    Raises:
        InvalidRequestError: they are no list of messages, or hold something else than text.
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
