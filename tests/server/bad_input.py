"""What a bad request is answered with, and what must hold afterwards. Knows no single case."""

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from live_server import CHAT as CHAT
from live_server import LiveServer, chat, num_threads

from tests.waiting import wait_until

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {  # the smallest sensible request of every endpoint
    CHAT: {"messages": HELLO, "max_tokens": 2, "temperature": 0},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 2, "temperature": 0},
    RESPONSES: {"input": "Hello", "max_output_tokens": 2, "temperature": 0},
    MESSAGES: {"messages": HELLO, "max_tokens": 2, "temperature": 0},
    COUNT: {"messages": HELLO},
    TOKENIZE: {"prompt": "Hello"},
    DETOKENIZE: {"tokens": [5]},
}
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {  # as `refused.yml` names them
    **{path.split("/")[-1]: (path, body) for path, body in GOOD.items()},
    "chat": (CHAT, GOOD[CHAT]),
    "count": (COUNT, GOOD[COUNT]),
    "tokenize text": (TOKENIZE, GOOD[TOKENIZE]),
    "tokenize": (TOKENIZE, {"messages": HELLO}),
    "completion": ("/completion", {"n_predict": 2}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
}
LEAKS = ("Traceback", 'File "', "site-packages", "mlxinfer/", ".py", "0x7f", "object at")
MAX_ANSWER_BYTES = 5000  # however large the request was
MEMORY_SLACK = 2 << 20
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error"}


def with_fields(path: str, **fields: Any) -> dict[str, Any]:
    """A good request of an endpoint, but for these fields."""
    return {**GOOD[path], **fields}


def expect_refusal(
    server: LiveServer,
    path: str,
    body: Any,
    *,
    status: int = 400,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Send a body (JSON, or bytes as they are); the error it is answered with.

    Nothing may be left of the request: nothing runs or waits, and no page is held.
    """
    sent = {"content-type": "application/json", **(headers or {})}
    if isinstance(body, bytes):
        answer = server.client.post(path, content=body, headers=sent)
    else:
        answer = server.client.post(path, json=body, headers=sent)
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    error = error_of(answer, path)
    if param is not None and not path.startswith(MESSAGES):
        assert error["param"] == param, error
    wait_until(server.is_idle)
    return error


def error_of(answer: httpx.Response, path: str) -> dict[str, Any]:
    """The error in an answer, which has the shape that the API of this path documents."""
    status = answer.status_code
    assert len(answer.content) < MAX_ANSWER_BYTES
    assert not [leak for leak in LEAKS if leak in answer.text], answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    body = answer.json()
    error: dict[str, Any] = body["error"]
    if path.startswith(MESSAGES):
        assert (set(body), set(error)) == ({"type", "error"}, {"type", "message"})
        assert body["type"] == "error"
        assert error["type"] == ANTHROPIC_TYPES.get(status, "invalid_request_error")
    else:
        assert (set(body), set(error)) == ({"error"}, {"message", "type", "param", "code"})
        assert error["type"] == OPENAI_TYPES.get(status, "invalid_request_error")
        assert error["code"]
    assert error["message"]
    return error


@dataclass(frozen=True)
class State:
    """What no refused request may change."""

    answers: list[Any]
    memory_bytes: int
    files: int
    threads: int


def unharmed(server: LiveServer) -> Iterator[None]:
    """Around a class of cases: the server answers as before, and has given everything back."""
    before = state_of(server)
    yield
    wait_until(server.is_idle)
    after = state_of(server)
    assert after.answers == before.answers
    # A traceback and its frames are a circle, and frames of a step hold arrays.
    wait_until(
        lambda: gc.collect() >= 0 and memory_of(server) <= before.memory_bytes + MEMORY_SLACK,
        pause_s=0.5,
    )
    assert after.files <= before.files + 32, "connections of this client, the grammars' process"
    assert after.threads <= before.threads + 1


def state_of(server: LiveServer) -> State:
    answers = [
        tokens(server, chat("What is 47 + 38", max_tokens=12)),
        tokens(server, chat("Tell me about pages", max_tokens=12, temperature=2.0, seed=7)),
    ]
    wait_until(server.is_idle)
    return State(
        answers=answers,
        memory_bytes=memory_of(server),
        files=len(os.listdir("/dev/fd")),
        threads=num_threads(),
    )


def memory_of(server: LiveServer) -> int:
    """Bytes of arrays, beside those of the KV cache, which keeps prefixes."""
    stats = server.stats()
    return int(stats["active_memory_bytes"] - stats["kv_bytes_allocated"])


def tokens(server: LiveServer, request: dict[str, Any]) -> list[str]:
    """The tokens of an answer."""
    answer = server.answer(CHAT, {**request, "logprobs": True})
    return [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
