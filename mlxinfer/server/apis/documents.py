"""Files in conversations: text files and PDFs, which models read as text."""

import base64
import binascii
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from ...errors import InvalidRequestError, UnsupportedFieldError
from ..call import Call
from ..pdf import BEGINNING
from .tools import NOT_READ, skip

PDF = "application/pdf"
PATIENCE_S = 30.0  # for earlier files that turn out to be unreadable; others are then not tried
MAX_HEAD = 1000  # characters of a data: URL in front of its data
_PLAIN = re.compile(r"text/[a-z0-9.+-]+|application/(?:json|xml|x-yaml|yaml|toml)?")


@dataclass(frozen=True, slots=True)
class PdfPart:
    """A PDF of a request."""

    data: str  # in base64
    place: str  # the field that errors name
    # called with the text, which takes the place of the PDF in the request
    replace: Callable[[str], None]
    is_earlier: bool = False  # it is of an earlier turn, which its client cannot mend any more


class SentFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file in a message, as OpenAI's APIs send it."""

    file_data: str | None = None  # of a text file or a PDF: a data URL, or base64
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None

    def shown(self, path: str) -> str:
        """The file as a model reads it."""
        if self.file_data is not None:
            return shown_file(text_of_file(self.file_data, f"{path}.file_data"), self.filename)
        if self.file_url is None and self.file_id is None:
            raise InvalidRequestError.of(f"{path}.file_data", "is missing.")
        name = "file_id" if self.file_url is None else "file_url"
        raise UnsupportedFieldError.of(
            f"{path}.{name}", "names a file elsewhere; send the file itself in file_data."
        )

    def pdfs(self, path: str, *, is_earlier: bool) -> Iterator[PdfPart]:
        if self.file_data is not None and (data := pdf_data(self.file_data)) is not None:
            yield PdfPart(data, f"{path}.file_data", self._be_text, is_earlier)

    def _be_text(self, text: str) -> None:
        self.file_data = f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"


async def read_pdfs(call: Call, parts: Iterable[PdfPart]) -> list[str]:
    """Put texts in place of PDFs; raises as `pdf_texts` for those of the newest turn.

    Returns notes (`skip`) on earlier PDFs that cannot be read and were left out.
    """
    pdfs = await call.in_worker(list, parts)
    newest = [part for part in pdfs if not part.is_earlier]
    if newest:
        texts = await call.pdf_texts({part.place: part.data for part in newest})
        for part, text in zip(newest, texts, strict=True):
            part.replace(text)
    skipped: list[str] = []
    lost_s = 0.0
    for part in pdfs:
        if not part.is_earlier:
            continue
        began_s, text = time.monotonic(), NOT_READ
        try:
            if lost_s < PATIENCE_S:
                (text,) = await call.pdf_texts({part.place: part.data})
        except InvalidRequestError:
            lost_s += time.monotonic() - began_s
        if text is NOT_READ:
            skip(skipped, part.place, "pdf")
        part.replace(text)
    return skipped


class _DataUrl(NamedTuple):
    """A `data:` URL in its parts."""

    kind: str  # the media type; "": none is stated
    is_base64: bool  # the content is base64, and otherwise percent-encoded (RFC 2397)
    content: str

    @classmethod
    def parse(cls, data: str) -> "_DataUrl | None":
        if not data.startswith("data:"):
            return None
        comma = data.find(",", 0, MAX_HEAD)
        if comma < 0:
            return None
        kind, *others = data[len("data:") : comma].split(";")
        return cls(kind.lower(), others[-1:] == ["base64"], data[comma + 1 :])


def pdf_data(data: str) -> str | None:
    """The base64 of a PDF that a request holds as a data URL or in base64; None: it is no PDF."""
    url = _DataUrl.parse(data)
    if url is None:
        return data if data.startswith(BEGINNING) else None
    return url.content if url.kind == PDF and url.is_base64 else None


def text_of_file(data: str, path: str) -> str:
    """The text of a file that a request holds as a data URL or in base64."""
    url = _DataUrl.parse(data) or _DataUrl("", is_base64=True, content=data)
    check_text_type(url.kind or "text/plain", path)
    try:
        if url.is_base64:
            return base64.b64decode(url.content, validate=True).decode()
        return unquote_to_bytes(url.content).decode()
    except (binascii.Error, UnicodeError, ValueError):
        form = "base64" if url.is_base64 else "percent-encoded form"
        raise InvalidRequestError.of(path, f"is no {form} of a text in UTF-8.") from None


def check_text_type(kind: str, path: str) -> None:
    if len(kind) > MAX_HEAD or not _PLAIN.fullmatch(kind.lower()):
        raise UnsupportedFieldError.of(
            path,
            f"is a file of type {kind[:50]!r}; text files (such as text/plain) and PDFs are read.",
        )


def shown_file(text: str, name: str | None) -> str:
    title = f' name="{name}"' if name else ""
    return f"<file{title}>\n{text}\n</file>"
