"""The parts of docs/ that the code gives; a server replies what docs/http.md shows."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from mlxinfer.server.app import ROUTES
from mlxinfer.server.openapi import document, plain_path
from tests.reference import generated, metrics_page, options_page, python_page
from tests.reference.http_page import (
    ALL,
    EXAMPLES,
    OTHER_NAMES,
    ReferenceServer,
    alike,
    exchanges,
    title_of,
)

HTTP = generated("http.md")
SECTION = re.compile(r"^(### .*?)$(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
REPLY = re.compile(r"^Reply(?: \((\d+)\))?:\n\n```json\n(.*?)\n```", re.MULTILINE | re.DOTALL)


def test_the_page_of_python_is_what_the_docstrings_give() -> None:
    """`python -m tests.reference` writes it."""
    assert generated("python.md") == python_page.page()


def test_the_page_of_metrics_has_each_name() -> None:
    assert generated("metrics.md") == metrics_page.page()


def test_the_table_of_options_is_that_of_the_commands() -> None:
    assert generated("options.md") == options_page.page()


def test_every_path_has_an_example() -> None:
    routes = {(route.method, route.path) for route in ALL}
    assert set(EXAMPLES) == {key for key in routes if key[1] not in OTHER_NAMES}


def test_the_description_has_every_path_and_field() -> None:
    """With the schemas of JSON Schema, and references that lead somewhere."""
    described = document(ROUTES)
    assert {(m.upper(), path) for path, of in described["paths"].items() for m in of} == {
        (route.method, plain_path(route)) for route in ROUTES
    }
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.validator_for({**schema, "components": described["components"]})
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described)):
        assert name in schemas
    assert {"repeat_penalty", "n_predict", "top_k"} <= schemas["ChatRequest"]["properties"].keys()
    operations = [operation for of in described["paths"].values() for operation in of.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


@pytest.mark.parametrize(
    ("said", "reply", "same"),
    [
        ({"a": 1}, {"a": 2.5}, True),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1, "…": "…"}, {"a": 1, "b": 2}, True),
        ([{"a": 1}, "…"], [{"a": 1}, {"a": 2}, {"a": 3}], True),
        ([{"a": 1}], [{"b": 1}], False),
        (None, "a", True),
    ],
)
def test_a_reply_of_another_form_is_noticed(said: Any, reply: Any, same: bool) -> None:
    assert alike(said, reply) is same


@pytest.mark.ci
def test_a_server_replies_what_the_page_shows(tmp_path: Path) -> None:
    """Each request is sent again, and matches the description of its body."""
    schemas = document(ROUTES)
    on_page = {title: (*REPLY.findall(text), None)[0] for title, text in SECTION.findall(HTTP)}
    num_replies = 0
    for exchange in exchanges(tmp_path):
        title = title_of(exchange)
        reply = on_page[title]
        if reply is not None:
            status, shown = reply
            assert exchange.status == int(status or 200), title
            assert alike(json.loads(shown), exchange.reply), (title, exchange.reply)
            num_replies += 1
        elif exchange.example.streams:
            assert exchange.reply.endswith("data: [DONE]\n\n")
        else:
            assert exchange.status == 200, title
        if exchange.body is not None:
            operation = schemas["paths"][plain_path(exchange.route)][exchange.route.method.lower()]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            whole = {**schema, "components": schemas["components"]}
            jsonschema_rs.validator_for(whole).validate(exchange.body)
    assert num_replies > 45


@pytest.mark.ci
def test_every_metric_of_a_server_is_on_its_page(tmp_path: Path) -> None:
    with ReferenceServer(tmp_path) as server:
        server.post("/v1/completions", {"prompt": "A", "max_tokens": 2})
        text = server.get("/metrics").text
    names = {name for name, _ in re.findall(r"^# TYPE (\S+) (\w+)", text, re.MULTILINE)}
    said = set(re.findall(r"^\| `([^`]+)`", generated("metrics.md"), re.MULTILINE))
    assert len(names) > 50
    assert names == said
