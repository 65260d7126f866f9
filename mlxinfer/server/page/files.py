"""GET / and /page/…: the built files of `apps/web`, read once when the server starts.

They hold nothing private and need no key: the page asks for one where the server has keys. The
content security policy allows no inline code, no inline styles and no other host, so what a model
writes can neither run nor phone home even if the page failed to clean it.
"""

import hashlib
from pathlib import Path

from ..call import Call
from ..http import Body, Route

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


def built_files() -> dict[str, Body]:
    """The answer for every file of the page, by path: `/` is index.html."""
    files = {}
    for file in sorted(BUILT.iterdir()):
        if file.suffix not in MEDIA_TYPES:
            continue
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        files[path] = _answer(file)
    return files


def _answer(file: Path) -> Body:
    content = file.read_bytes()
    headers = [
        (b"etag", f'"{hashlib.sha256(content).hexdigest()[:32]}"'.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    if file.suffix == ".html":
        headers.append((b"content-security-policy", POLICY))
    return Body(content, media_type=MEDIA_TYPES[file.suffix], headers=headers)


def _route(path: str, answer: Body) -> Route:
    etag = dict(answer.headers)[b"etag"]

    async def page_file(call: Call) -> Body:
        """The page; 304 where the browser has the file."""
        if call.header(b"if-none-match") == etag:
            return Body(b"", 304, answer.media_type, answer.headers)
        return answer

    return Route("GET", path, page_file, "anyone")


ROUTES = tuple(_route(path, answer) for path, answer in built_files().items())
