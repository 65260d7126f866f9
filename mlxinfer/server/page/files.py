"""GET / and /page/…: the built files of `apps/web`, read once when the server starts.

They hold nothing private and need no key: the page asks for one where the server has keys. The
content security policy allows no inline code, no inline styles and no other host, so what a model
writes can neither run nor phone home even if the page failed to clean it.
"""

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..call import Call
from ..http import Body, Route

FOREVER = b"public, max-age=31536000, immutable"
BUILT = Path(__file__).parent / "built"
MEDIA_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".woff2": b"font/woff2",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' "
    b"data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types dompurify"
)
_REFERENCE = re.compile(rb"(?:/page/|\./)([\w.-]+\.[a-z0-9]+)")


@dataclass(frozen=True)
class PageFile:
    """A built file as it is sent; an address with `?v=` and its version never changes."""

    content: bytes
    suffix: str

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:32]

    @cached_property
    def compressed(self) -> bytes | None:
        return None if self.suffix == ".woff2" else gzip.compress(self.content, mtime=0)

    def reply(self, call: Call) -> Body:
        etag = f'"{self.version}"'.encode()
        forever = call.query.get("v") == self.version
        headers = [
            (b"etag", etag),
            (b"cache-control", FOREVER if forever else b"no-cache"),
            (b"vary", b"accept-encoding"),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]
        if self.suffix == ".html":
            headers.append((b"content-security-policy", POLICY))
        media_type = MEDIA_TYPES[self.suffix]
        if call.header(b"if-none-match") == etag:
            return Body(b"", 304, media_type, headers)
        takes_gzip = b"gzip" in (call.header(b"accept-encoding") or b"")
        if self.compressed is None or not takes_gzip:
            return Body(self.content, media_type=media_type, headers=headers)
        encoding = (b"content-encoding", b"gzip")
        return Body(self.compressed, media_type=media_type, headers=[*headers, encoding])


def built_files() -> dict[str, PageFile]:
    """Every file of the page, by path: `/` is index.html. References have versions."""
    files: dict[str, PageFile] = {}
    # A file is read after those that it refers to: styles name fonts, and the page names all.
    for file in sorted(BUILT.iterdir(), key=lambda file: (file.suffix in (".css", ".html"), file)):
        if file.suffix not in MEDIA_TYPES:
            continue
        content = file.read_bytes()
        if file.suffix in (".css", ".html"):
            content = _REFERENCE.sub(lambda match: _versioned(match, files), content)
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        files[path] = PageFile(content, file.suffix)
    return files


def _versioned(reference: re.Match[bytes], files: Mapping[str, PageFile]) -> bytes:
    file = files.get(f"/page/{reference[1].decode()}")
    return reference[0] if file is None else reference[0] + f"?v={file.version}".encode()


def _route(path: str, file: PageFile) -> Route:
    async def page_file(call: Call) -> Body:
        return file.reply(call)

    return Route("GET", path, page_file, "anyone")


ROUTES = tuple(_route(path, file) for path, file in built_files().items())
