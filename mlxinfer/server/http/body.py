"""Reading of request bodies within limits, and decoding them into structs."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from ...errors import InvalidRequestError
from ..errors import BodyTooLargeError, SlowBodyError

T = TypeVar("T")
MAX_CONTAINERS = 1_000_000  # brackets and braces, in strings too
_HALF_A_PAIR = re.compile(  # of an escaped surrogate pair: a lone first half, or a lone second one
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_AT = re.compile(r" - at (`key` in |`value` in )?`\$\.?(.*)`$")


class ClientGoneError(Exception):
    """The client disconnected before its request was complete."""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The complete body.

    Raises:
        BodyTooLargeError: declared or found longer than `max_bytes`.
        SlowBodyError: not complete after `timeout_s`.
        ClientGoneError: the client disconnected.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(receive, max_bytes)
    except TimeoutError:
        raise SlowBodyError(f"The body did not arrive within {timeout_s:g} seconds.") from None


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {max_bytes} bytes, which is the limit.")


def decode(body: bytes, kind: type[T]) -> T:
    """The body as a struct.

    Raises:
        InvalidRequestError: it is not JSON in UTF-8, holds too many lists and objects, or a field
            has the wrong type; `param` is then the path of that field.
    """
    _check_containers(body)
    try:
        body.decode()  # msgspec does not look into strings of fields that it skips
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(_not_json(body, str(error))) from None


def _not_json(body: bytes, message: str) -> str:
    """A message that names an empty body and half a character, which the parser does not."""
    if not body.strip():
        return "The body is empty; expected a JSON object."
    half = _HALF_A_PAIR.search(body)
    if half:
        return (
            f"The body holds half of a surrogate pair, {half.group().decode()}: a text was cut "
            "in the middle of a character. Send valid Unicode."
        )
    return f"The body is not valid JSON: {message}"


def _check_containers(body: bytes) -> None:
    """Refuse millions of lists: they take 25 times their text, and block all other threads."""
    found = body.count(b"[") + body.count(b"{")
    if found > MAX_CONTAINERS:
        raise InvalidRequestError(
            f"The body holds {found} lists and objects, or texts with as many brackets; "
            f"at most {MAX_CONTAINERS} are accepted. Send less at once."
        )


def _wrong_field(message: str) -> InvalidRequestError:
    """The error of msgspec's `Expected int, got str - at $.a[0].b`, with the path as `param`."""
    found = _AT.search(message)
    missing = re.match(r"Object missing required field `(\w+)`", message)
    path = found.group(2) if found else ""
    if missing:
        path = f"{path}.{missing.group(1)}".lstrip(".")
        return InvalidRequestError(f"{path} is missing, and is required.", param=path)
    text = _AT.sub("", message)
    return InvalidRequestError(f"{path}: {text}." if path else f"{text}.", param=path or None)
