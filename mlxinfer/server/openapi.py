"""GET /openapi.json: the paths and the bodies of requests, made from the routes themselves.

OpenAPI 3.1. Clients that make their types from it find every field that a body may have, with its
bounds, and the names of other servers for the same field. Replies are plain data without a schema.
"""

import inspect
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from .. import __version__
from .http import Body, Plain, RequestBody, Route, encode

if TYPE_CHECKING:
    from .call import Call

PATH = "/openapi.json"
_PARAM = re.compile(r"\{(\w+)(?::path)?\}")
_REF = "#/components/schemas/{name}"


def route_of(routes: Iterable[Route]) -> Route:
    """The route that describes `routes` and itself."""

    @cache
    def content() -> bytes:
        return encode(document((*described, route)))

    async def openapi(call: "Call") -> Body:
        """The paths of this server and the bodies of their requests, as OpenAPI 3.1."""
        return Body(await call.in_worker(content))

    route, described = Route("GET", PATH, openapi), tuple(routes)
    return route


def document(routes: Iterable[Route]) -> Plain:
    routes = tuple(routes)
    kinds = list(dict.fromkeys(kind for route in routes if (kind := body_of(route)) is not None))
    references, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind, reference in zip(kinds, references, strict=True):
        _add_aliases(schemas[reference["$ref"].rpartition("/")[2]], kind)
    paths: dict[str, Plain] = {}
    by_kind = dict(zip(kinds, references, strict=True))
    for route in routes:
        operations = paths.setdefault(plain_path(route), {})
        operations[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxinfer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def plain_path(route: Route) -> str:
    return _PARAM.sub(r"{\1}", route.path)


def body_of(route: Route) -> type[RequestBody] | None:
    return None if route.takes_file else route.body


def summary_of(route: Route) -> str:
    return (inspect.getdoc(route.handler) or "").partition("\n")[0]


def _operation(route: Route, schemas: dict[type[RequestBody], Plain]) -> Plain:
    kind = body_of(route)
    operation: Plain = {
        "summary": summary_of(route),
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", route.path)]),
        "security": [] if route.access == "anyone" else [{"key": []}],
        "responses": {
            "200": {"description": "The answer."},
            "default": {"description": "An error, in the form of the path's API."},
        },
    }
    names = _PARAM.findall(route.path)
    if names:
        text = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in names
        ]
    if route.takes_file:
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    elif kind is not None:
        content = {"application/json": {"schema": schemas[kind]}}
        operation["requestBody"] = {"required": not kind.may_be_empty, "content": content}
    return operation


def _add_aliases(schema: Plain, kind: type[RequestBody]) -> None:
    for alias, name in kind.aliases.items():
        if name in schema["properties"]:
            same = {**schema["properties"][name], "description": f"The same as {name}."}
            schema["properties"].setdefault(alias, same)
