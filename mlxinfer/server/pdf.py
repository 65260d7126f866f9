"""The text of PDFs, which pypdf reads in a process that may be killed (`killable`).

A PDF is a program of a stranger: it may be small and take hours, or unpack to gigabytes. A job is
{"files": [base64, ...]}, and its reply is {"texts": [...]}, or {"error": what is wrong, "index": of
the file at fault}.
"""

import base64
import binascii
import io
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from ..errors import InvalidRequestError, UnsupportedFieldError
from ..killable import EndedError, KillablePool, KillableProcess, Packet, limit_cpu, serve

MAX_BYTES = 32 << 20  # of a file
MAX_PAGES = 1000  # of a file
MAX_CHARS = 4_000_000  # of a file's text
MAX_SECONDS = 30  # of all PDFs of a request
MAX_MEMORY = 1 << 30  # bytes
PROCESSES = 3  # the last one for a tenant that would wait for others, see `Workers`
MAX_WAITING = 16  # requests that wait while others' PDFs are read
IDLE_S = 30.0  # after which a process ends
BEGINNING = "JVBERi"  # of each PDF in base64: %PDF
_pool = KillablePool(
    *[
        KillableProcess("mlxinfer.server.pdf", None, max_seconds=MAX_SECONDS, max_bytes=MAX_MEMORY)
        for _ in range(PROCESSES)
    ]
)


def can_read_pdf() -> bool:
    return find_spec("pypdf") is not None


def pdf_texts(files: Mapping[str, str], abandoned: Callable[[], bool]) -> list[str]:
    """Return the texts of PDFs, the pages of each separated by empty lines.

    Args:
        files: the field that errors name -> the PDF in base64.
        abandoned: says whether the caller has left. Reading then ends.

    Raises:
        UnsupportedFieldError: pypdf is not installed.
        InvalidRequestError: a PDF is broken, encrypted, too large or without text, or all of
            them together take too much time or memory.
        OverloadedError: too many wait.
        CancelledError: the caller has left.
    """
    _check(files)
    places = list(files)
    try:
        reply = _pool.ask(Packet({"files": list(files.values())}), abandoned).value
    except EndedError:
        raise InvalidRequestError.of(
            places[0],
            f"takes more than {MAX_SECONDS:g} s or {MAX_MEMORY / 1e6:.0f} MB to read, alone or "
            "with the other PDFs of the request.",
        ) from None
    if "error" in reply:
        raise InvalidRequestError.of(places[reply["index"]], reply["error"])
    texts: list[str] = reply["texts"]
    return texts


def _check(files: Mapping[str, str]) -> None:
    for place, data in files.items():
        if not can_read_pdf():
            raise UnsupportedFieldError.of(
                place,
                "is a PDF, which this server cannot read: pip install -e '.[pdf]' in a checkout of "
                "mlxinfer.",
            )
        if len(data) * 3 // 4 > MAX_BYTES:
            raise InvalidRequestError.of(place, f"has more than {MAX_BYTES:,} bytes.")


# -- in the process -------------------------------------------------------------------------------


class _UnreadableError(Exception):
    """A PDF has no text that can be read; the message says why, behind a name."""


def answer(job: Packet) -> Packet:
    if job.value is None:
        return Packet(None)
    limit_cpu(MAX_SECONDS)
    texts: list[str] = []
    for file in job.value["files"]:
        try:
            texts.append(_text(file))
        except _UnreadableError as error:
            return Packet({"error": str(error), "index": len(texts)})
    return Packet({"texts": texts})


def _text(file: str) -> str:
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        data = base64.b64decode("".join(file.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _UnreadableError("is no base64.") from None
    try:
        return _text_of(data)
    except (FileNotDecryptedError, DependencyError):  # also a cipher that needs another package
        raise _UnreadableError("is an encrypted PDF; send it without a password.") from None
    except (_UnreadableError, MemoryError):
        raise
    except Exception as error:  # pypdf: broken files may raise anything
        raise _UnreadableError(f"is no PDF that can be read ({type(error).__name__}).") from error


def _text_of(data: bytes) -> str:
    from pypdf import PdfReader

    if b"startxref" not in data:  # the table of objects is missing: pypdf then looks for them
        data += b"\nstartxref\n0\n%%EOF"
    pages = PdfReader(io.BytesIO(data)).pages
    if len(pages) > MAX_PAGES:
        raise _UnreadableError(f"has {len(pages):,} pages; at most {MAX_PAGES:,} are read.")
    texts: list[str] = []
    for page in pages:
        texts.append(page.extract_text())
        if sum(map(len, texts)) > MAX_CHARS:
            raise _UnreadableError(f"has more than {MAX_CHARS:,} characters.")
    text = "\n\n".join(texts).strip()
    if not text:
        raise _UnreadableError("has no text: its pages are pictures, or empty.")
    return text.encode(errors="replace").decode()  # without lone surrogates


if __name__ == "__main__":
    serve(answer, idle_s=IDLE_S)
