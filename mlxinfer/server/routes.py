"""Routes: method, path, handler and the access that a request needs; the one place that says so."""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .errors import HttpError

Access = Literal["anyone", "key", "admin"]
_PARAM = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True)
class Route:
    """One method of one path.

    Attributes:
        method, path: "POST", "/v1/chat/completions"; `{name}` in the path is a parameter, found in
            `Call.path_params`; `{name:path}` may hold slashes.
        handler: gets the Call and, if it has a second argument, the body as that argument's type.
            It returns plain data, which is sent as JSON, or a Body, or Events. The first line of
            its docstring describes it.
        access: "anyone": no key is needed, so the path shows nothing private. "key": a key of the
            server, where it has keys. "admin": a key that administers the server; for models,
            adapters and everything that other keys see.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    access: Access = "key"

    @cached_property
    def body(self) -> type | None:
        """The struct of the request's body; None: no body is read."""
        parameters = list(inspect.signature(self.handler).parameters.values())
        return parameters[1].annotation if len(parameters) > 1 else None

    @property
    def summary(self) -> str:
        """One line for the documentation."""
        return (self.handler.__doc__ or "").partition("\n")[0]


class RouteTable:
    """Finds the route of a request.

    Args:
        routes: no two of them with one method and path.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in self.routes:
            methods = self._exact.setdefault(route.path, {})
            if _PARAM.search(route.path):
                methods = self._patterns.setdefault(_pattern(route.path), {})
                del self._exact[route.path]
            assert route.method not in methods, route.path
            methods[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route of a request, and the values of its path's parameters.

        Raises:
            HttpError: nothing is served at this path, or for other methods only.
        """
        methods, params = self._methods(path)
        if not methods:
            raise HttpError("not_found", "Nothing is served at this path; /docs lists all paths.")
        found = methods.get("GET" if method == "HEAD" else method)
        if found is None:
            raise HttpError("method_not_allowed", "This path is there, but not for this method.")
        return found, params

    def serves(self, path: str) -> bool:
        """Whether the path is served for some method."""
        return bool(self._methods(path)[0])

    def _methods(self, path: str) -> tuple[dict[str, Route], dict[str, str]]:
        if path in self._exact:
            return self._exact[path], {}
        for pattern, methods in self._patterns.items():
            if found := pattern.fullmatch(path):
                return methods, found.groupdict()
        return {}, {}


def _pattern(path: str) -> re.Pattern[str]:
    """The expression of a path with parameters."""
    parts = _PARAM.split(path)  # text, name, ":path" or None, text, …
    found = re.escape(parts[0])
    for name, slashes, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        found += f"(?P<{name}>{'.+' if slashes else '[^/]+'}){re.escape(text)}"
    return re.compile(found)
