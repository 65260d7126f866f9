"""Chat completions over a real socket: fields, streams, errors."""

from typing import Any

import pytest
from live_server import CHAT, LiveServer, chat

from mlxinfer.session import session
from mlxinfer.text.fim import FimTokens


def content(answer: Any) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_an_answer_has_openais_shape(server: LiveServer) -> None:
    answer = server.post(CHAT, chat("What is 47 + 38", max_tokens=40))
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "47 + 38 = 85",
        "refusal": None,
    }
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_says_role_content_reason_counts_done(server: LiveServer) -> None:
    request = chat("What is 47 + 38", max_tokens=40)
    whole = server.post(CHAT, request).json()
    *chunks, counts, done = server.events(
        CHAT, {**request, "stream_options": {"include_usage": True}}
    )
    assert done == "[DONE]"
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    text = "".join(c["delta"].get("content", "") for c in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_without_counts_has_no_usage_field(server: LiveServer) -> None:
    *chunks, done = server.events(CHAT, chat())
    assert done == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_seeded_choices_differ_and_repeat(server: LiveServer, stream: bool) -> None:
    request = chat("Tell me about pages", temperature=3.0, seed=5, n=3, max_tokens=12)

    def texts() -> list[str]:
        if not stream:
            return [c["message"]["content"] for c in server.post(CHAT, request).json()["choices"]]
        found = [""] * 3
        for chunk in server.events(CHAT, request)[:-1]:
            choice = chunk["choices"][0]
            found[choice["index"]] += choice["delta"].get("content", "")
        return found

    first = texts()
    assert first == texts()
    assert len(set(first)) == 3
    alone = server.post(CHAT, {**request, "n": 1, "seed": 6})
    assert content(alone) == first[1]


def test_text_ends_before_the_stop_string(server: LiveServer) -> None:
    request = chat("What is 47 + 38", max_tokens=40, stop=["= "])
    answer = server.post(CHAT, request).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("47 + 38 ", "stop")
    chunks = server.events(CHAT, request)[:-1]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "47 + 38 "


def test_logprobs_spell_the_content(server: LiveServer) -> None:
    request = chat("What is 47 + 38", max_tokens=40, logprobs=True, top_logprobs=3)
    choice = server.post(CHAT, request).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == choice["message"]["content"]
    assert all(len(e["top_logprobs"]) == 3 and e["logprob"] <= 0 for e in entries)
    assert all(e["top_logprobs"][0]["token"] == e["token"] for e in entries)  # greedy
    streamed = [
        entry
        for chunk in server.events(CHAT, request)[:-1]
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert [e["token"] for e in streamed] == [e["token"] for e in entries]


def test_max_tokens_is_a_length(server: LiveServer) -> None:
    answer = server.post(CHAT, chat(max_tokens=None, max_completion_tokens=3)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_parts_roles_and_nulls_are_read(server: LiveServer) -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "Hello"},
    ]
    spelled = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": None,
        },
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "Hello"},
    ]
    nulls: dict[str, Any] = {
        "tools": None,
        "response_format": None,
        "stop": None,
        "seed": None,
        "n": None,
    }
    one = server.post(CHAT, chat(messages=plain)).json()
    two = server.post(CHAT, chat(messages=spelled, **nulls, unknown_field={"a": 1})).json()
    assert one["choices"] == two["choices"]
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]


def test_the_last_message_can_be_continued(server: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "What is 47 + 38"},
        {"role": "assistant", "content": "47 + 38 ="},
    ]
    request = chat(messages=messages, continue_final_message=True, max_tokens=20)
    assert content(server.post(CHAT, request)) == " 85"


TEXT_OF_A_PART = "messages[0].content[0].text"
BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"logit_bias": {"5": 500}}, "logit_bias[...]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, TEXT_OF_A_PART),
    ({"audio": {}}, "audio"),
    ({"best_of": 2}, "best_of"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_bad_field_is_named(live: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    answer = live.post(CHAT, chat(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}


def test_images_are_refused(live: LiveServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    answer = live.post(CHAT, chat(messages=[{"role": "user", "content": [part]}]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].type"


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_the_context_is_said_before_a_stream(
    server: LiveServer, stream: bool
) -> None:
    for request in (chat("word " * 5000), chat("word " * 100_000)):
        answer = server.post(CHAT, {**request, "stream": stream})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]


def test_an_unknown_model_is_not_found(server: LiveServer) -> None:
    for name in ("gpt-9", "/etc/passwd", "../demo", "a" * 10_000):
        answer = server.post(CHAT, chat(model=name))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert len(answer.text) < 1000


def test_models_are_listed(server: LiveServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("demo", 2048)
    assert server.get("/v1/models/demo").json() == card
    assert server.get("/v1/models/none").status_code == 404


def test_timings_are_there_on_request(server: LiveServer) -> None:
    body = chat("Hello", max_tokens=4, timings=True)
    answer = server.post(CHAT, body).json()
    (choice,) = answer["choices"]
    assert answer["timings"] == choice["timings"]  # where llama.cpp has them
    assert choice["timings"]["predicted_n"] == 4
    assert choice["timings"]["prompt_n"] + choice["timings"]["cache_n"] == 12
    assert choice["timings"]["predicted_per_second"] > 0
    events = server.events(CHAT, chat("Hello", max_tokens=4, timings_per_token=True))[:-1]
    timed = [e for e in events if "timings" in e["choices"][0]]
    assert [e["choices"][0]["finish_reason"] for e in timed] == ["length"]
    assert [e["timings"]["predicted_n"] for e in events if "timings" in e] == [4]
    whole = {"prompt": "Hello", "timings": True, "ignore_eos": True}
    (text,) = server.post("/v1/completions", whole).json()["choices"]
    assert text["timings"]["predicted_n"] == 16
    (plain,) = server.post(CHAT, chat("Hello", max_tokens=4)).json()["choices"]
    assert "timings" not in plain


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/infill"])
def test_a_stream_says_how_far_its_prompt_is(
    server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step with a part of it, and with what was in the cache, as llama.cpp does."""
    marks = FimTokens(prefix=2001, suffix=2002, middle=2003, end_ids=frozenset())
    monkeypatch.setattr(session, "fim_tokens", lambda _: marks)
    text = f"{path} one two three four five six seven eight " * 60
    asked = chat(text, max_tokens=2, return_progress=True)
    asked |= {"prompt": text} if path == "/v1/completions" else {}
    asked |= {"input_prefix": text, "input_suffix": ""} if path == "/infill" else {}
    for cached in (False, True):
        events = [event for event in server.events(path, asked) if event != "[DONE]"]
        found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert "prompt_progress" not in events[-1]
        assert found
        assert [each["processed"] for each in found] == sorted(each["processed"] for each in found)
        last = found[-1]
        assert last["processed"] == last["total"] > 500
        assert (last["cache"] > 400) is cached
        assert all(each["cache"] == last["cache"] <= each["processed"] for each in found)
    assert not any("prompt_progress" in e for e in server.events(CHAT, chat("Hi"))[:-1])
