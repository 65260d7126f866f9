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
from .http import EVENTS, Body
from .routes import Route

WIDEST = 2**63 - 1  # a bound of a machine word, which the page leaves out
_STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 60rem; padding: 0 1rem } h2 { font-size: 1.05rem; margin-top: 2.2rem }
code, .method { font-family: ui-monospace, monospace } .method { font-weight: 700 }
table { border-collapse: collapse; width: 100% } td { border-top: 1px solid #8884;
padding: .25rem .6rem .25rem 0; vertical-align: top } td.type { opacity: .75 }
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
    types = list({t for r in routes for t in (r.body, *r.answers) if t is not None})
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
    answers = [schema_of[each] for each in route.answers]
    answer = {"anyOf": answers} if len(answers) > 1 else [*answers, {}][0]
    contents: dict[str, Any] = {"application/json": {"schema": answer}}
    operation: dict[str, Any] = {
        "summary": route.summary,
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
    """The document as an HTML page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>mlxinfer: API</title>",
        f"<style>{_STYLE}</style><h1>mlxinfer</h1>",
        "<p>Fields marked * are required, all others may be left out. For programs: "
        "<a href=/openapi.json>/openapi.json</a>, with the types that are only named here.",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            head = f"<span class=method>{method.upper()}</span> <code>{escape(path)}</code>"
            parts.append(f"<h2>{head}</h2><p>{escape(operation['summary'])}")
            if "requestBody" in operation:
                kind = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_fields(document["components"]["schemas"][kind.rpartition("/")[2]]))
    return "".join(parts).encode()


def _fields(schema: dict[str, Any]) -> str:
    """A table of the fields of a body."""
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}"
        f"<td class=type>{escape(_type_of(kind))}"
        for name, kind in schema["properties"].items()
        if kind != {"default": None}  # known, and refused
    ]
    return f"<table>{''.join(rows)}</table>"


def _type_of(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        kinds: Sequence[str] = [_type_of(kind) for kind in schema["anyOf"]]
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type_of, schema['prefixItems']))}]"
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "maxLength": "length ≤"}
    said = {key: sign for key, sign in bounds.items() if abs(schema.get(key, WIDEST)) < WIDEST}
    limits = [f"{sign} {schema[key]}" for key, sign in said.items()]
    return " ".join([str(schema.get("type", schema.get("description", "any"))), *limits])
