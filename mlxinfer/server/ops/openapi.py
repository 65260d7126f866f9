"""GET /openapi.json and /docs: descriptions of the endpoints, generated from their types.

The page has no scripts and loads nothing. Neither path needs a key: both describe the project and
reveal nothing of a server's models, settings or users.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec
import msgspec.structs

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Body, Reply, json_body

_REF = "#/components/schemas/{name}"
WIDEST = 2**63 - 1  # a bound of a machine word, which the page leaves out
_STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 60rem; padding: 0 1rem } h2 { font-size: 1.05rem; margin-top: 2.2rem }
code, .method { font-family: ui-monospace, monospace } .method { font-weight: 700 }
table { border-collapse: collapse; width: 100% } td { border-top: 1px solid #8884;
padding: .25rem .6rem .25rem 0; vertical-align: top } td.type { opacity: .75 }
"""


def describe(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints."""
    listed = list(endpoints)
    types = [t for e in listed for t in (e.body, e.answer) if t is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in listed:
        path = endpoint.path.replace(":path}", "}")
        operations, method = paths.setdefault(path, {}), endpoint.method.lower()
        operation = _operation(endpoint, schema_of)
        plain = operations.setdefault(method, operation)
        if plain is not operation:
            _also(plain, operation, endpoint)
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


def _operation(endpoint: Endpoint, schema_of: dict[type, Any]) -> dict[str, Any]:
    answer = schema_of[endpoint.answer] if endpoint.answer is not None else {}
    operation: dict[str, Any] = {
        "operationId": endpoint.operation or endpoint.handler.__name__,
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "Done.", "content": _contents(endpoint, answer)},
            "default": {"description": "An error, with a message, a type and a code."},
        },
    }
    if not endpoint.needs_key:
        operation["security"] = []
    if endpoint.body is not None:
        body = {"application/json": {"schema": schema_of[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].partition(":")[0].rstrip("}")
        where = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [where]
    return operation


def _also(plain: dict[str, Any], other: dict[str, Any], endpoint: Endpoint) -> None:
    """Add to an operation the one that replaces it for requests with a header."""
    assert endpoint.if_header is not None
    header = {"in": "header", "name": endpoint.if_header.decode(), "schema": {"type": "string"}}
    plain.setdefault("parameters", []).append({**header, "description": other["summary"]})
    here = plain["responses"]["200"]["content"]["application/json"]
    there = other["responses"]["200"]["content"]["application/json"]
    here["schema"] = {"anyOf": [here["schema"], there["schema"]]}


def _contents(endpoint: Endpoint, answer: Any) -> dict[str, Any]:
    contents: dict[str, Any] = {"application/json": {"schema": answer}}
    if endpoint.body is not None:
        names = [field.name for field in msgspec.structs.fields(endpoint.body)]
        if "stream" in names:
            contents["text/event-stream"] = {"schema": {"type": "string"}}
    return contents


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
            parts.append(_section(method.upper(), path, operation, document))
    return "".join(parts).encode()


def _section(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    head = f"<h2><span class=method>{method}</span> <code>{escape(path)}</code></h2>"
    text = f"{head}<p>{escape(operation['summary'])}"
    if "requestBody" not in operation:
        return text
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}"
        f"<td class=type>{escape(_type_of(kind))}"
        for name, kind in schema["properties"].items()
        if kind != {"default": None}  # known, and refused
    ]
    return f"{text}<table>{''.join(rows)}</table>"


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


def documentation(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints of both descriptions, which are made when one of them is asked for."""

    @cache
    def document() -> dict[str, Any]:
        return describe(endpoints)

    @cache
    def page() -> Body:
        policy = b"default-src 'none'; style-src 'unsafe-inline'"
        return Body(
            page_of(document()),
            media_type=b"text/html; charset=utf-8",
            headers=[(b"content-security-policy", policy)],
        )

    async def openapi(call: Call, _: None) -> Reply:
        return json_body(document())

    async def docs(call: Call, _: None) -> Reply:
        return page()

    return (
        Endpoint(
            method="GET",
            path="/openapi.json",
            handler=openapi,
            summary="This description as OpenAPI",
            needs_key=False,
        ),
        Endpoint(
            method="GET",
            path="/docs",
            handler=docs,
            summary="This description as a page",
            needs_key=False,
        ),
    )
