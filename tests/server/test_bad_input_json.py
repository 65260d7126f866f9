"""Bad input: bodies that are no JSON, or JSON of another shape. Every endpoint that takes one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT, GOOD, expect_refusal, unharmed, with_fields
from live_server import LiveServer


@pytest.fixture(scope="module", autouse=True)
def whole(live: LiveServer) -> Iterator[None]:
    yield from unharmed(live)


def with_raw(path: str, raw: bytes) -> bytes:
    """A good body with one more member, spelled by hand."""
    return json.dumps(GOOD[path]).encode()[:-1] + b", " + raw + b"}"


NO_JSON: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b"  \n ",
    "half": b'{"messages": [',
    "an array": b"[]",
    "null": b"null",
    "a text": b'"text"',
    "a number": b"17",
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "overlong UTF-8": b'{"a": "\xc0\x80"}',
    "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte-order mark": b"\xef\xbb\xbf{}",
    "NUL": b"\0",
    "a NUL in it": b'{"a": \x00 1}',
    "a raw newline in a text": b'{"a": "x\ny"}',
    "single quotes": b"{'a': 1}",
    "a comment": b"{} // that was it",
    "two values": b"{}{}",
    "a comma too many": b'{"a": 1,}',
    "a form": b"messages=x&model=demo",
    "XML": b"<messages/>",
    "deep arrays": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep and open": b"[" * 1_000_000,
}


@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_object(live: LiveServer, path: str, name: str) -> None:
    expect_refusal(live, path, NO_JSON[name])


TOKENS = {
    "NaN": b'"x": NaN',
    "Infinity": b'"x": -Infinity',
    "a bare word": b'"x": yes',
    "hexadecimal": b'"x": 0x10',
    "a leading zero": b'"x": 01',
    "a plus": b'"x": +1',
    "half a surrogate pair": b'"x": "\\ud800"',
    "half a pair in a name": b'"\\udc00": 1',
    "an unknown escape": b'"x": "\\q"',
    "a cut escape": b'"x": "\\u12"',
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_wrong_token_in_a_field_that_is_not_read(live: LiveServer, name: str) -> None:
    expect_refusal(live, CHAT, with_raw(CHAT, TOKENS[name]))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"surrogate pair, \ud83d:"),
        (b'{"x": "\\ud83d\\ude00 \\uDE00"}', r"surrogate pair, \uDE00:"),
        (b'{"x": "\\ud83d\\ude00', "truncated"),
    ],
)
def test_the_problem_is_named(live: LiveServer, body: bytes, problem: str) -> None:
    headers = {"content-type": "application/json"}
    answer = live.client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


HUGE: dict[str, tuple[bytes, str]] = {
    "a count": (b'"max_tokens": ' + b"9" * 5000, "max_tokens"),
    "a float": (b'"temperature": 1e999', "temperature"),
    "a seed": (b'"seed": ' + b"-" + b"9" * 400, "seed"),
    "in a schema": (b'"guided_json": {"minimum": ' + b"9" * 5000 + b"}", "guided_json[...]"),
    "a refused field": (b'"best_of": ' + b"9" * 5000, "best_of"),
    "a token id": (b'"logit_bias": {"' + b"9" * 5000 + b'": 1}', "logit_bias"),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_numbers(live: LiveServer, name: str) -> None:
    raw, param = HUGE[name]
    expect_refusal(live, CHAT, with_raw(CHAT, raw), param=param)


@pytest.mark.parametrize("raw", [b'"x": ' + b"9" * 5000, b'"x": 1e999', b'"x": "' + b"y" * 10**6])
def test_unknown_fields_are_skipped_whatever_they_hold(live: LiveServer, raw: bytes) -> None:
    body = with_raw(CHAT, raw + (b'"' if b"y" in raw else b""))
    headers = {"content-type": "application/json"}
    assert live.client.post(CHAT, content=body, headers=headers).status_code == 200


def test_of_two_equal_names_both_are_checked_and_the_last_one_counts(live: LiveServer) -> None:
    good = json.dumps(GOOD[CHAT]).encode()
    expect_refusal(live, CHAT, with_raw(CHAT, b'"temperature": 7e5'), param="temperature")
    expect_refusal(live, CHAT, b'{"temperature": 7e5, ' + good[1:], param="temperature")
    headers = {"content-type": "application/json"}
    answer = live.client.post(CHAT, content=with_raw(CHAT, b'"max_tokens": 1'), headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 1


WRONG_TYPES: list[Any] = [True, 1.5, "1", [], {}]


@pytest.mark.parametrize("value", WRONG_TYPES, ids=repr)
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "max_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
        (CHAT, "seed"),
        (CHAT, "n"),
    ],
)
def test_what_is_no_integer(live: LiveServer, path: str, field: str, value: Any) -> None:
    expect_refusal(live, path, with_fields(path, **{field: value}), param=field)


@pytest.mark.parametrize("value", [5, True, [], {}, 1.5], ids=repr)
@pytest.mark.parametrize("path", [path for path in GOOD if path != "/detokenize"])
def test_what_is_no_model_name(live: LiveServer, path: str, value: Any) -> None:
    expect_refusal(live, path, with_fields(path, model=value), param="model")


@pytest.mark.parametrize("name", ["nobody", "", "../../etc/passwd", "/etc/passwd", "x" * 10**6])
@pytest.mark.parametrize("path", GOOD)
def test_models_that_are_not_there(live: LiveServer, path: str, name: str) -> None:
    expect_refusal(live, path, with_fields(path, model=name), status=404)


@pytest.mark.parametrize("path", [path for path in GOOD if path != "/tokenize"])
def test_an_empty_object_lacks_something(live: LiveServer, path: str) -> None:
    assert "missing" in expect_refusal(live, path, {})["message"]
