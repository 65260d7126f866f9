"""Plain completions: prompts of every form, echo, log-probabilities."""

import math
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer

from mlxinfer import LLM

PATH = "/v1/completions"
TEXT = "The KV cache holds the keys"


def ask(prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}


def ids_of(server: LiveServer, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return ids


def test_a_text_its_ids_and_batches_of_both_go_on_the_same(server: LiveServer) -> None:
    ids = ids_of(server, TEXT)
    one = server.post(PATH, ask()).json()
    assert one["object"] == "text_completion"
    assert server.post(PATH, ask(ids)).json()["choices"] == one["choices"]
    both = server.post(PATH, ask([TEXT, ids, "A page"])).json()
    assert [c["index"] for c in both["choices"]] == [0, 1, 2]
    assert [c["text"] for c in both["choices"][:2]] == [one["choices"][0]["text"]] * 2
    assert both["usage"]["prompt_tokens"] == 2 * len(ids) + len(ids_of(server, "A page"))


def test_a_stream_joins_to_the_answer(server: LiveServer) -> None:
    request = ask(["A page", TEXT], n=2, seed=1, temperature=2.0, logprobs=2, echo=True)
    whole = server.post(PATH, request).json()
    *chunks, counts, done = server.events(
        PATH, {**request, "stream_options": {"include_usage": True}}
    )
    assert done == "[DONE]"
    for choice in whole["choices"]:
        pieces = [p for c in chunks for p in c["choices"] if p["index"] == choice["index"]]
        assert "".join(p["text"] for p in pieces) == choice["text"]
        tokens = [t for p in pieces if p["logprobs"] for t in p["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["length"]
    assert counts["usage"] == whole["usage"] | {
        "prompt_tokens_details": counts["usage"]["prompt_tokens_details"]
    }


def test_echoed_logprobs_are_those_of_the_model(server: LiveServer) -> None:
    """The scores of a prompt's tokens, against a softmax of the logits that the library gives."""
    ids = ids_of(server, TEXT)
    answer = server.post(PATH, ask(ids, echo=True, logprobs=2, max_tokens=1)).json()
    found = answer["choices"][0]["logprobs"]
    with LLM("demo") as llm:
        logits = llm.logits(ids).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        row = scores[position - 1]
        assert math.isclose(found["token_logprobs"][position], row[ids[position]], abs_tol=1e-3)
        best = max(found["top_logprobs"][position].values())
        assert math.isclose(best, row.max(), abs_tol=1e-3)
    assert len(found["tokens"]) == len(ids) + 1


def test_offsets_point_into_the_text(server: LiveServer) -> None:
    choice = server.post(PATH, ask(echo=True, logprobs=0)).json()["choices"][0]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    alone = server.post(PATH, ask(logprobs=0)).json()["choices"][0]["logprobs"]
    assert alone["text_offset"][0] == len(TEXT)


def test_scoring_alone_generates_nothing(server: LiveServer) -> None:
    answer = server.post(PATH, ask(echo=True, logprobs=1, max_tokens=0)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_half_a_character_at_the_end_of_an_echoed_prompt_is_shown_once(
    server: LiveServer,
) -> None:
    def text(prompt: list[int], **fields: Any) -> str:
        found: str = server.post(PATH, ask(prompt, **fields)).json()["choices"][0]["text"]
        return found

    ids = ids_of(server, "A→")
    prompts = [ids[:cut] for cut in range(1, len(ids) + 1)]
    alone = [text(prompt, echo=True, max_tokens=0) for prompt in prompts]
    assert any(shown.endswith("\ufffd") for shown in alone)
    for prompt, shown in zip(prompts, alone, strict=True):
        expected = shown.removesuffix("\ufffd") + text(prompt)
        assert text(prompt, echo=True) == expected


def test_a_cut_character_is_spelled_as_bytes(server: LiveServer) -> None:
    choice = server.post(PATH, ask("é→ø", echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    raw = b"".join(
        bytes.fromhex(t.removeprefix("bytes:").replace("\\x", ""))
        if t.startswith("bytes:")
        else t.encode()
        for t in tokens
    )
    assert raw.decode() == "é→ø"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[5], [10**12]]}, "prompt[1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"response_format": {"type": "nonsense"}}, "response_format"),
    ],
)
def test_a_bad_field_is_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = live.post(PATH, {**ask(), **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_default_answer_has_sixteen_tokens(server: LiveServer) -> None:
    answer = server.post(PATH, {"prompt": TEXT, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 16
