"""Request targets that hold a whole URL, as clients of proxies send them. Knows no paths."""

import re
from urllib.parse import unquote

from starlette.types import Scope

_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


def read_target(scope: Scope) -> None:
    """Leave the path alone of a URL; its host takes the place of the Host header (RFC 9112, 3.2.2).

    What is checked of a Host is so checked of the one that the client has named.
    """
    found = _ABSOLUTE.fullmatch(scope["raw_path"])
    if found is None:
        return
    host, path = found.group(1), found.group(2) or b"/"
    scope["raw_path"] = path
    scope["path"] = unquote(path.decode())
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", host), *others]
