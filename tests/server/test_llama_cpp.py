"""Paths and fields of llama.cpp and vLLM that clients look for."""

from typing import Any

import pytest
from live_server import CHAT, LiveServer, chat

TEXT = "The KV cache holds"
GREEDY: dict[str, Any] = {"prompt": TEXT, "n_predict": 4, "temperature": 0}


def test_the_server_and_its_model_are_told(server: LiveServer) -> None:
    for path in ("/health", "/v1/health", "/ping"):
        assert server.get(path).json() == {"status": "ok"}
    assert server.get("/version").json()["version"]
    props = server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "messages" in props["chat_template"]
    assert props["eos_token"] == "<|im_end|>"
    assert props["total_slots"] == 16
    assert server.get("/props?model=none").status_code == 404


@pytest.mark.parametrize("prompts", [TEXT, [TEXT, "Hello"]])
def test_probabilities_equal_completions(server: LiveServer, prompts: str | list[str]) -> None:
    body = {"prompt": prompts, "max_tokens": 4, "temperature": 0, "logprobs": 3}
    choices = server.post("/v1/completions", body).json()["choices"]
    asked = {**GREEDY, "prompt": prompts, "n_probs": 3}
    whole = server.post("/completion", asked).json()
    answers = whole if isinstance(prompts, list) else [whole]
    events = server.events("/completion", {**asked, "stream": True})
    for index, (choice, answer) in enumerate(zip(choices, answers, strict=True)):
        rows = answer["completion_probabilities"]
        expected = choice["logprobs"]["token_logprobs"][: len(rows)]
        assert [row["logprob"] for row in rows] == pytest.approx(expected, abs=1e-4)
        assert all(len(row["top_logprobs"]) == 3 for row in rows)
        assert [row["id"] for row in rows] == [row["top_logprobs"][0]["id"] for row in rows]
        streamed = [
            row
            for event in events
            if event["index"] == index
            for row in event.get("completion_probabilities", ())
        ]
        assert [row["id"] for row in streamed] == [row["id"] for row in rows]
        assert [len(row["top_logprobs"]) for row in streamed] == [3] * len(rows)


@pytest.mark.parametrize("field", ["grammar", "ebnf", "guided_grammar"])
def test_a_grammar_of_llama_cpp_binds_the_answer(server: LiveServer, field: str) -> None:
    grammar = 'root ::= word ("-" word){2}\nword ::= "ab" | "cd"\n'
    body = chat("Hello", max_tokens=40, **{field: grammar})
    text = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert [part in ("ab", "cd") for part in text.split("-")] == [True] * 3


def test_options_of_a_stream_have_no_effect_without_one(server: LiveServer) -> None:
    body = chat("Hello", max_tokens=2, stream_options={"include_usage": True})
    assert server.post(CHAT, body).json()["object"] == "chat.completion"
