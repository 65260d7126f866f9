"""The description of the API agrees with the API."""

import re

import jsonschema
from live_server import CHAT, LiveServer, chat

from mlxinfer.server.app import ROUTES


def test_every_endpoint_is_described(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()
    described = {(m.upper(), p) for p, ops in document["paths"].items() for m in ops}
    assert described == {(e.method, e.path.replace(":path}", "}")) for e in ROUTES}
    identifiers = [o["operationId"] for ops in document["paths"].values() for o in ops.values()]
    assert len(set(identifiers)) == len(identifiers)


def test_what_needs_no_key_is_said_to_need_none(server: LiveServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    open_to_all = {p for p, ops in paths.items() for o in ops.values() if o.get("security") == []}
    assert open_to_all == {"/health", "/ready"}


def test_streams_are_mentioned_where_there_are_some(server: LiveServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    kinds = {p: o["post"]["responses"]["200"]["content"] for p, o in paths.items() if "post" in o}
    assert "text/event-stream" in kinds[CHAT]
    assert "text/event-stream" not in kinds["/tokenize"]


def test_requests_fit_their_schemas(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()
    operation = document["paths"][CHAT]["post"]
    asked = operation["requestBody"]["content"]["application/json"]["schema"]
    whole = {**asked, "components": document["components"]}
    validator = jsonschema.Draft202012Validator(whole)
    validator.validate(chat(stop=["x"], logprobs=True, top_logprobs=1))
    assert not validator.is_valid(chat(temperature="hot"))


def test_the_page_needs_nothing_from_elsewhere(server: LiveServer) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert CHAT in page.text
    assert not re.search(r"<script|https?://|<link|<img", page.text)
