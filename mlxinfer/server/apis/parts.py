"""Parts of messages in requests as the session reads them: texts and pictures.

A picture is translated here and loaded by the session. The call fetches those that are named by a
URL (`Call.encode`, `Call.start`), where the server does so. No request can name a file.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from ...errors import InvalidRequestError, PictureError, UnsupportedFieldError, shown
from ...images import from_base64, from_data_url
from ...text import Content
from ..http import Plain

P = TypeVar("P")
Prompts = str | list[str | int | list[int]]  # one, several, one as token ids, or several of these
URLS = ("http://", "https://")


def texts_of(given: Prompts, name: str, most: int) -> dict[str, str | list[int]]:
    """The texts of a field, each with its place in the request.

    Raises:
        InvalidRequestError: there is none, there are more than `most`, or ids are mixed with texts.
    """
    if isinstance(given, str) or (given and all(type(item) is int for item in given)):
        return {name: given}  # type: ignore[dict-item]  # a text, or ids
    if not 0 < len(given) <= most:
        raise InvalidRequestError.of(name, f"holds {len(given)} texts; expected 1 to {most}.")
    found: dict[str, str | list[int]] = {}
    for index, item in enumerate(given):
        if isinstance(item, int):
            raise InvalidRequestError.of(
                name, "mixes token ids with texts; expected texts, ids, or lists of ids."
            )
        found[f"{name}[{index}]"] = item
    return found


class ImageUrl(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A picture of OpenAI's chat."""

    url: str
    detail: str | None = None


def text_part(text: str) -> Plain:
    """The part of a text."""
    return {"type": "text", "text": text}


def url_part(url: str | None, detail: str | None, path: str) -> Plain:
    """The part of a picture with a data: URL, or with an http URL.

    Raises:
        PictureError: it is no such URL, or its data are no base64.
        UnsupportedFieldError: a picture that was uploaded before.
    """
    if url is None:
        raise UnsupportedFieldError.of(path, "has no image_url; uploaded files are not kept here.")
    if url.startswith("data:"):
        return _image(from_data_url(url, place=path), path, detail)
    if not url.lower().startswith(URLS):
        raise PictureError.of(
            path,
            f"is {shown(url)}; expected a URL that begins with data:image/png;base64, or with "
            "https:.",
        )
    return _image(url, path, detail)


def base64_part(data: str, path: str) -> Plain:
    """The part of a picture in base64; raises PictureError where it is none."""
    return _image(from_base64(data, place=path), path)


def _image(source: bytes | str, path: str, detail: str | None = None) -> Plain:
    return {"type": "image", "image": source, "detail": detail, "place": path}


def read_content(content: str | Sequence[P], read: Callable[[P, str], Plain], path: str) -> Content:
    """The content of a message with a text, or with parts that `read` reads, each with its path."""
    if isinstance(content, str):
        return content
    return content_of(read(part, f"{path}[{i}]") for i, part in enumerate(content))


def content_of(parts: Iterable[Plain]) -> Content:
    """The content of a message: its parts if some are pictures, else its texts, line by line."""
    found = list(parts)
    if any(part["type"] == "image" for part in found):
        return found
    return "\n".join(part["text"] for part in found)
