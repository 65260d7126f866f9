"""GET /openapi.json and /docs: descriptions of the routes, generated from their types.

The page has no scripts and loads nothing. Neither path needs a key: both describe the project and
reveal nothing of a server's models, settings or users.
"""

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec
import msgspec.structs

from .call import Call
from .http import EVENTS, Body, Route

_STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 60rem; padding: 0 1rem } table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .25rem .6rem .25rem 0; vertical-align: top }
"""


def documentation(routes: Sequence[Route]) -> tuple[Route, ...]:
    """The routes of both descriptions, which are made when one of them is asked for."""
    document = cache(lambda: describe(routes))

    async def openapi(call: Call) -> dict[str, Any]:
        """This description as OpenAPI."""
        return document()

    async def docs(call: Call) -> Body:
        """This description as a page."""
        policy = b"default-src 'none'; style-src 'unsafe-inline'"
        return Body(
            page_of(document()),
            media_type=b"text/html; charset=utf-8",
            headers=[(b"content-security-policy", policy)],
        )

    return (
        Route("GET", "/openapi.json", openapi, "anyone"),
        Route("GET", "/docs", docs, "anyone"),
    )


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    types = list({route.body for route in routes if route.body is not None})
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    names: dict[str, int] = {}
    for route in routes:
        name = route.handler.__name__
        number = names[name] = names.get(name, -1) + 1
        operation = {"operationId": f"{name}{number or ''}", **_operation(route, schema_of)}
        operations = paths.setdefault(route.path.replace(":path}", "}"), {})
        operations[route.method.lower()] = operation
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxinfer", "version": version("mlxinfer")},
        "paths": paths,
        "security": [{}, *({name: []} for name in keys)],
        "components": {"schemas": components, "securitySchemes": keys},
    }


def _operation(route: Route, schema_of: dict[type, Any]) -> dict[str, Any]:
    contents: dict[str, Any] = {"application/json": {"schema": {}}}
    operation: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Done.", "content": contents},
            "default": {"description": "An error, with a message, a type and a code."},
        },
    }
    if route.access == "anyone":
        operation["security"] = []
    if route.body is not None:
        body = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": body}
        if "stream" in [field.name for field in msgspec.structs.fields(route.body)]:
            contents[EVENTS.decode().partition(";")[0]] = {"schema": {"type": "string"}}
    if "{" in route.path:
        name = route.path.partition("{")[2].partition("}")[0].removesuffix(":path")
        where = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [where]
    return operation


def page_of(document: dict[str, Any]) -> bytes:
    """The paths of the document as an HTML page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>mlxinfer: API</title>",
        f"<style>{_STYLE}</style><h1>mlxinfer</h1>",
        "<p>The fields of bodies and answers: <a href=/openapi.json>/openapi.json</a><table>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            cells = f"{method.upper()} <td><code>{escape(path)}</code>"
            parts.append(f"<tr><td>{cells}<td>{escape(operation['summary'])}")
    return "".join(parts).encode()
