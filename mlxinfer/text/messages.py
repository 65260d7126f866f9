"""Messages of conversations as chat templates read them, and the pictures that they hold."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidRequestError, shown

Content = str | list[dict[str, Any]]  # text, or parts of text and places of pictures

_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
_TEXTS = ("text", "input_text", "output_text")
_PART = (
    '{"type": "text", "text": ...}, {"type": "image", "image": ...} or '
    '{"type": "video", "frames": [...]}'
)


class ImagePart(NamedTuple):
    """A picture or a video in a message, as it came.

    Attributes:
        source: a path, bytes, a data: URL, a PIL image or an array; of a video, a path, bytes or a
            list of pictures.
        low_detail: the picture may become few tokens.
        place: the field that errors name.
        is_video: this is a video.
        fps: frames a second of a list of pictures, if the message states it.
    """

    source: Any
    low_detail: bool
    place: str
    is_video: bool = False
    fps: float | None = None


def read_messages(messages: Any) -> tuple[list[dict[str, Any]], list[ImagePart]]:
    """Return messages as templates read them, and the pictures in them, in their order.

    The content of a message is text, and several text parts are joined by newlines. With pictures
    it is a list of {"type": "text", "text": ...}, {"type": "image"} and {"type": "video"}.

    Raises:
        InvalidRequestError: this is no list of messages, or a part is of another type.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _wrong(f"messages is {shown(messages)}; expected a list such as {_EXAMPLE}.")
    images: list[ImagePart] = []
    found = [_message(message, f"messages[{i}]", images) for i, message in enumerate(messages)]
    return found, images


def _message(message: Any, path: str, images: list[ImagePart]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong(f"{path} is {shown(message)}; expected one such as {_EXAMPLE[1:-1]}.")
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise _wrong(f"{path} has no content; give it a text.")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(f"{path}.content is {shown(content)}; expected a text.")
    before = len(images)
    parts = [_part(part, f"{path}.content[{i}]", images) for i, part in enumerate(content)]
    if len(images) > before:
        return {**message, "content": parts}
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _part(part: Any, path: str, images: list[ImagePart]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise _wrong(f"{path} is {shown(part)}; expected {_PART}.")
    kind = part.get("type")
    if kind in ("image", "image_url", "input_image"):
        images.append(_image(part, kind, path))
        return {"type": "image"}
    if kind == "video":
        images.append(_video(part, path))
        return {"type": "video"}
    if kind not in _TEXTS:
        raise _wrong(f"{path} is of type {shown(kind)}; expected {_PART}.")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{path}.text is {shown(part.get('text'))}; expected a text.")
    return {"type": "text", "text": part["text"]}


def _image(part: Mapping[str, Any], kind: str, path: str) -> ImagePart:
    name = "image" if kind == "image" else "image_url"
    source: Any = part.get(name)
    detail = part.get("detail")
    if isinstance(source, Mapping):  # {"url": ..., "detail": ...}
        detail = source.get("detail", detail)
        source = source.get("url")
    if source is None:
        raise _wrong(f"{path}.{name} is missing; give it a picture.")
    if name == "image_url" and not (isinstance(source, str) and source.startswith("data:")):
        raise _wrong(
            f"{path}.image_url is {shown(source)}; expected a data: URL. A picture in a file goes "
            'into {"type": "image", "image": path}.'
        )
    return ImagePart(source, detail == "low", part.get("place", f"{path}.{name}"))


def _video(part: Mapping[str, Any], path: str) -> ImagePart:
    sources = [name for name in ("video", "frames") if part.get(name) is not None]
    if len(sources) != 1:
        raise _wrong(
            f'{path} has {" and ".join(sources) or "no video"}; expected "video", a file, or '
            '"frames", a list of pictures.'
        )
    (name,) = sources
    if (name == "frames") != isinstance(part[name], list | tuple):
        expected = "a list of pictures" if name == "frames" else "a path or bytes"
        raise _wrong(f"{path}.{name} is {shown(part[name])}; expected {expected}.")
    low = part.get("detail") == "low"
    place = part.get("place", f"{path}.{name}")
    return ImagePart(part[name], low, place, is_video=True, fps=part.get("fps"))


def around(content: Content | None, before: str = "", after: str = "") -> Content:
    """Return a content with text before and after it."""
    if not isinstance(content, list):
        return f"{before}{content or ''}{after}"
    return [*_parts(before), *content, *_parts(after)]


def joined(one: Content, two: Content, between: str = "\n") -> Content:
    """Return two contents as one."""
    if isinstance(one, str) and isinstance(two, str):
        return f"{one}{between}{two}"
    return [*_parts(one), *_parts(between), *_parts(two)]


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
