"""POST /page/pdf: the text of a PDF, read by pypdf in a process that can be killed."""

import base64
import binascii
import subprocess
import sys
from importlib.util import find_spec

import msgspec

from ...errors import InvalidRequestError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import Workers
from ..http.replies import Reply, json_body

LIMIT_S = 30.0
MEMORY_BYTES = 2 << 30
MAX_CHARS = 4_000_000
_READ = f"""
import io, resource, sys
if sys.platform == "linux":  # macOS does not limit address space
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
from pypdf import PdfReader
reader = PdfReader(io.BytesIO(sys.stdin.buffer.read()))
pages = (page.extract_text() for page in reader.pages)
sys.stdout.buffer.write("\\n\\n".join(pages).encode(errors="replace"))
"""


class PdfFile(msgspec.Struct, kw_only=True):
    """A file and its content in base64."""

    name: str
    data: str


class PdfText(msgspec.Struct, kw_only=True):
    """The text of all pages."""

    name: str
    text: str


def can_read_pdf() -> bool:
    """Whether pypdf, of the extra `pdf`, is installed."""
    return find_spec("pypdf") is not None


def pdf_text(name: str, data: bytes) -> str:
    """The text of a PDF, its pages separated by empty lines.

    Raises:
        InvalidRequestError: it cannot be read, takes too long or too much memory, or has no text.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _READ],
            input=data,
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequestError(f"{name} takes too long to read.", param="data") from None
    if done.returncode != 0:
        raise InvalidRequestError(f"{name} is no PDF that can be read.", param="data")
    text = done.stdout.decode(errors="replace")[:MAX_CHARS].strip()
    if not text:
        raise InvalidRequestError(f"{name} has no text: its pages are images.", param="data")
    return text


def pdf_endpoint(workers: Workers) -> Endpoint:
    """The endpoint, with threads of its own to wait in."""

    async def read_pdf(call: Call, body: PdfFile) -> Reply:
        """The text of a PDF."""
        try:
            data = base64.b64decode(body.data, validate=True)
        except binascii.Error:
            raise InvalidRequestError("data is not base64.", param="data") from None
        text = await workers.run(pdf_text, body.name[:200], data)
        return json_body(PdfText(name=body.name, text=text))

    return Endpoint(
        method="POST",
        path="/page/pdf",
        handler=read_pdf,
        summary="The text of a PDF.",
        body=PdfFile,
        answer=PdfText,
    )
