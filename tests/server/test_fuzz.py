"""Requests of every shape: each gets a documented answer, and the server goes on."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import CHAT, LiveServer

from mlxinfer.server.apis.chat import ChatRequest
from mlxinfer.server.apis.completions import CompletionRequest

EXTREMES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308),
    *("", "a", "\0", "é→🙂", "<|im_end|>", "x" * 3000, [], {}, [[]], [{}], {"": None}, [None]),
    *({"type": "text"}, {"type": "json_object"}, {"999999": 1}, {"5": -100}, ["a", 1], [0, 2047]),
]
values = st.one_of(
    st.sampled_from(EXTREMES),
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 3000) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
)
FINE: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
messages = [{"role": "user", "content": "Hello"}]


def check(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        assert len(answer.content) < 5000


def requests_of(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = [n for n in kind.__struct_fields__ if n not in ("max_tokens", "n", "stream")]
    return st.dictionaries(st.sampled_from(names), values, max_size=3)


@settings(max_examples=60)
@given(fields=requests_of(ChatRequest))
def test_chat_answers_anything(live: LiveServer, fields: dict[str, Any]) -> None:
    check(live, CHAT, {**FINE, "messages": messages, **fields})


@settings(max_examples=40)
@given(fields=requests_of(CompletionRequest))
def test_completions_answer_anything(live: LiveServer, fields: dict[str, Any]) -> None:
    check(live, "/v1/completions", {**FINE, "prompt": "Hello", **fields})


def test_and_the_server_is_whole(server: LiveServer) -> None:
    server.check_idle()
