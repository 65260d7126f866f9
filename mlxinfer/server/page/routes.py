"""Routes of the page beside its files: history, models, PDFs, settings."""

import base64
import binascii
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from ... import __version__
from ...errors import InvalidRequestError
from ...history import History
from ..call import Call
from ..http import RequestBody
from ..routes import Route
from ..service import ServerState
from ..workers import Workers
from .conversations import ConversationRoutes
from .library import RECIPES, Library, LibraryRoutes

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


class Setting(msgspec.Struct, kw_only=True):
    """An effective setting of the server, and where it comes from."""

    name: str
    value: Any
    origin: str


class PdfFile(RequestBody, kw_only=True):
    """A file and its content in base64."""

    name: str
    data: str


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


class PageRoutes:
    """The routes of one server's page.

    Args:
        history: where conversations are kept; None: nowhere.
        library: models of this disk and of the hub; None: neither.
        settings: of the server.
    """

    def __init__(
        self,
        history: History | None = None,
        library: Library | None = None,
        settings: Sequence[Setting] = (),
    ) -> None:
        self._history = history
        self._library = None if library is None else LibraryRoutes(library)
        self._settings = list(settings)
        self._workers = Workers(1)
        self._pdf = can_read_pdf()

    async def features(self, call: Call) -> dict[str, Any]:
        """The parts of the page that this server has."""
        is_admin = call.service.config.keys.administers(call.key)
        return {
            "version": __version__,
            "history": self._history is not None,
            "hub": self._library is not None and is_admin,
            "pdf": self._pdf,
            "admin": is_admin,  # the key may see and do what is under /admin and /hub
            "recipes": RECIPES,
        }

    async def settings(self, call: Call) -> dict[str, list[Setting]]:
        """The effective settings with their origin; keys are not shown."""
        return {"data": self._settings}

    async def read_pdf(self, call: Call, body: PdfFile) -> dict[str, str]:
        """The text of a PDF."""
        try:
            data = base64.b64decode(body.data, validate=True)
        except binascii.Error:
            raise InvalidRequestError("data is not base64.", param="data") from None
        text = await self._workers.run(pdf_text, body.name[:200], data)
        return {"name": body.name, "text": text}

    def routes(self) -> tuple[Route, ...]:
        """The routes of this server's page."""
        found: tuple[Route, ...] = (
            Route("GET", "/page/features", self.features),
            Route("GET", "/admin/settings", self.settings, "admin"),
        )
        if self._history is not None:
            found += ConversationRoutes(self._history).routes()
        if self._library is not None:
            found += self._library.routes()
        return (*found, Route("POST", "/page/pdf", self.read_pdf)) if self._pdf else found

    def restore(self, service: ServerState) -> None:
        """Serve the models that were added on the page before."""
        if self._library is not None:
            self._library.restore(service)

    def close(self) -> None:
        """End jobs and threads, and close the history."""
        if self._library is not None:
            self._library.close()
        self._workers.close()
        if self._history is not None:
            self._history.close()
