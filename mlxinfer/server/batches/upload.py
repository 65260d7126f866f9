"""Uploads: a form with a file (multipart/form-data, RFC 7578), written to the disk as it comes."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from starlette.types import Receive, Scope

from ...errors import InvalidRequestError
from ..errors import SlowBodyError
from ..files import FileStore
from ..http.body import ClientGoneError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartParser

MAX_FIELDS = 32
MAX_FIELD_BYTES = 64 << 10  # of a field that is no file, and of a part's headers
FILE = "file"  # the field with the content


@dataclass(slots=True)
class Upload:
    """A form that has been read."""

    path: Path  # of the content, complete
    id: str  # under which it may be listed
    name: str
    fields: dict[str, str] = field(default_factory=dict)


async def read_upload(
    scope: Scope, receive: Receive, files: FileStore, *, timeout_s: float
) -> Upload:
    """The form of a request; its file lies where the store wants it.

    Raises:
        InvalidRequestError: it is no form, or has no file.
        BodyTooLargeError: the store has no room for the file.
        SlowBodyError: nothing came for `timeout_s`.
        ClientGoneError: the client disconnected.
    """
    from python_multipart.multipart import parse_options_header

    files.check_room(0)
    kind, options = parse_options_header(dict(scope["headers"]).get(b"content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequestError("The body is no form; send multipart/form-data with a file.")
    id = files.new_id()
    part = files.path(id).with_suffix(".part")
    try:
        with part.open("wb") as target:
            form = _Form(target, files)
            await _feed(form.parser(boundary), receive, timeout_s)
        if not form.ended or form.file_name is None:
            raise InvalidRequestError("The form has no file, or is cut off.", param=FILE)
        files.check_room(part.stat().st_size)  # others may have taken it meanwhile
        part.rename(files.path(id))
    finally:
        part.unlink(missing_ok=True)
    return Upload(files.path(id), id, form.file_name, form.fields)


async def _feed(parser: "MultipartParser", receive: Receive, timeout_s: float) -> None:
    from python_multipart.exceptions import FormParserError

    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise SlowBodyError(f"Nothing of the body came for {timeout_s:g} seconds.") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        try:
            parser.write(message.get("body", b""))
            if not message.get("more_body", False):
                parser.finalize()
                return
        except FormParserError as error:
            raise InvalidRequestError(f"The form is broken: {error}") from None


class _Form:
    """What the parser calls: fields are collected, the file is written."""

    def __init__(self, target: BinaryIO, files: FileStore) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.ended = False
        self._target, self._files, self._room = target, files, files.room()
        self._num_bytes = 0
        self._begin()

    def parser(self, boundary: bytes) -> "MultipartParser":
        """A parser that calls this form."""
        from python_multipart.multipart import MultipartParser

        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, low, high: self._add(self._header, data[low:high]),
                "on_header_value": lambda data, low, high: self._add(self._value, data[low:high]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def _begin(self) -> None:
        self._header, self._value, self._text = bytearray(), bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == FILE
        if self._is_file and self.file_name is not None:
            raise InvalidRequestError("The form has two files; send one.", param=FILE)
        if self._is_file:
            self.file_name = options.get(b"filename", b"").decode(errors="replace") or "upload"

    def _take(self, data: bytes, low: int, high: int) -> None:
        if not self._is_file:
            self._add(self._text, data[low:high])
            return
        self._num_bytes += high - low
        if self._num_bytes > self._room:
            self._files.check_room(self._num_bytes)
        self._target.write(data[low:high])

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode(errors="replace")
        if len(self.fields) > MAX_FIELDS:
            raise InvalidRequestError(f"The form has more than {MAX_FIELDS} fields; send fewer.")

    def _end(self) -> None:
        self.ended = True

    def _add(self, text: bytearray, data: bytes) -> None:
        text += data
        if len(text) > MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"A field of the form has more than {MAX_FIELD_BYTES} bytes; send less."
            )
