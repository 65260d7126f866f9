"""Text files in conversations: `input_file`, `document` and `search_result` parts become text."""

import base64
import binascii
import re

from ...errors import InvalidRequestError, UnsupportedFieldError

_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*?(;base64)?,(.*)", re.DOTALL)
_PLAIN = re.compile(r"text/[a-z0-9.+-]+|application/(?:json|xml|x-yaml|yaml|toml)?")


def text_of_file(data: str, path: str) -> str:
    """The text of a file that a request holds as a data URL or in base64.

    Raises:
        UnsupportedFieldError: it is no text file.
        InvalidRequestError: it is no base64, or no UTF-8.
    """
    found = _DATA_URL.fullmatch(data)
    kind, encoded, content = ("text/plain", True, data)
    if found is not None:
        kind, encoded, content = found[1] or "text/plain", found[2] is not None, found[3]
    check_text_type(kind, path)
    if not encoded:
        return content
    try:
        return base64.b64decode(content, validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        raise InvalidRequestError(f"{path} is no base64 of a text in UTF-8.", param=path) from None


def check_text_type(kind: str, path: str) -> None:
    """Raise UnsupportedFieldError for a media type that is no text."""
    if not _PLAIN.fullmatch(kind.lower()):
        raise UnsupportedFieldError(
            f"{path} is a file of type {kind[:50]!r}; text files are read, such as text/plain.",
            param=path,
        )


def shown_file(text: str, name: str | None) -> str:
    """A file in a message, as a model reads it."""
    title = f' name="{name}"' if name else ""
    return f"<file{title}>\n{text}\n</file>"
