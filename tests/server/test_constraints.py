"""Answers that a request constrains: the demo model, greedy and hot, keeps to every form."""

import json
import re
from typing import Any

import jsonschema
import openai
import pydantic
from live_server import CHAT, LiveServer, chat

COMPLETIONS = "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
AMBIGUOUS = "start: s\ns: s s s | s s | /./ |"


def answer(server: LiveServer, **fields: Any) -> str:
    reply = server.answer(CHAT, chat("Give me JSON for a user", max_tokens=80, **fields))
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


FIELDS: list[dict[str, Any]] = [
    {"response_format": AS_SCHEMA},
    {"guided_json": PERSON},
    {"guided_json": json.dumps(PERSON)},
    {"structured_outputs": {"json": PERSON}},
    {"json_schema": PERSON},
    {"response_format": {"type": "json_object", "schema": PERSON}},
]


def test_a_schema_is_kept_under_any_name(server: LiveServer) -> None:
    for fields in FIELDS:
        text = answer(server, temperature=2.0, seed=1, **fields)
        jsonschema.validate(json.loads(text), PERSON)


def test_json_objects_regexes_and_choices(server: LiveServer) -> None:
    hot = {"temperature": 2.0, "seed": 2}
    date = r"\d{4}-\d{2}-\d{2}"
    assert re.fullmatch(date, answer(server, guided_regex=date, **hot))
    assert re.fullmatch(date, answer(server, response_format={"type": "regex", "regex": date}))
    assert answer(server, guided_choice=["yes", "no"], **hot) in ("yes", "no")
    assert answer(server, structured_outputs={"choice": ["a", "b"]}, **hot) in ("a", "b")
    assert answer(server, guided_grammar='start: "x" "y"*', stop=["xyy"]) in ("x", "xy", "")
    assert answer(server, response_format={"type": "text"}) == answer(server)


def test_streams_choices_and_prompts_share_a_grammar(server: LiveServer) -> None:
    request = chat("A user?", n=3, temperature=2.0, seed=4, max_tokens=80)
    texts = [""] * 3
    for chunk in server.events(CHAT, {**request, "response_format": AS_SCHEMA})[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    plain = {"prompt": ["a", "b"], "guided_regex": "[0-9]{3}", "max_tokens": 8}
    choices = server.post(COMPLETIONS, plain).json()["choices"]
    assert all(re.fullmatch("[0-9]{3}", choice["text"]) for choice in choices)


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_the_library_parses_into_its_own_types(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        completion = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "Give me JSON for a user named Grace aged 47"}],
            response_format=Person,
            temperature=0,
            max_tokens=80,
        )
    assert completion.choices[0].message.parsed == Person(name="Grace", age=47)


def test_a_grammar_that_fails_in_mid_answer_is_told_as_the_requests_own(server: LiveServer) -> None:
    forms: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"structured_outputs": {"grammar": AMBIGUOUS}}, "structured_outputs.grammar"),
        (COMPLETIONS, {"guided_grammar": AMBIGUOUS}, "guided_grammar"),
    ]
    for path, fields, param in forms:
        body = {"prompt": "x"} if path == COMPLETIONS else chat("x")
        body = {**body, "max_tokens": 60, "temperature": 1, "seed": 1, "ignore_eos": True, **fields}
        failed = server.post(path, body)
        assert failed.status_code == 400, failed.text
        *_, event = (event for event in server.events(path, body) if event != "[DONE]")
        for error in (failed.json()["error"], event["error"]):
            assert (error["type"], error["code"]) == ("invalid_request_error", "grammar_failed")
            assert error["param"] == param
            assert "cannot go on after" in error["message"]
            assert "<" not in error["message"]


PAIR: dict[str, Any] = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}
UNEQUAL = {**PAIR, "uniqueItems": True}


def test_what_masks_cannot_hold_is_checked_and_tried_again(server: LiveServer) -> None:
    """Streamed or not, no client sees an answer that breaks its schema."""
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": UNEQUAL}}
    attempts = set()
    for seed in range(4):
        body = chat("Two bits?", temperature=2.0, seed=seed, response_format=form, max_tokens=40)
        reply = server.post(CHAT, body)
        assert reply.status_code == 200, reply.text
        text = reply.json()["choices"][0]["message"]["content"]
        assert sorted(json.loads(text)) == [0, 1], f"seed {seed}"
        attempts.add(reply.headers.get("x-mlxinfer-attempts"))
        events = server.events(CHAT, body)[:-1]
        streamed = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert streamed == text
    assert None in attempts
    assert len(attempts) > 1


def test_no_answer_is_better_than_a_wrong_one(server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {**PAIR, "contains": {"const": 7}}}}
    reply = server.post(CHAT, chat("Bits?", max_tokens=40, response_format=form))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "grammar_failed"
    assert reply.json()["error"]["param"] == "response_format.json_schema.schema"
    last = server.events(CHAT, chat("Bits?", max_tokens=40, response_format=form))[-1]
    assert last["error"]["code"] == "grammar_failed"
