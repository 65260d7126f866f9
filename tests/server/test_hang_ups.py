"""Clients that leave, wait too long, do not read, or come too many at once."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import CHAT, LiveServer, chat, events_of, long_chat
from raw_http import connect, post, status_of
from steps import hanging

from mlxinfer.core import SamplingParams
from mlxinfer.errors import OverloadedError
from mlxinfer.fair import Tenant
from mlxinfer.server.admission import MAX_RETRY_S, MIN_RETRY_S, Admission, WaitingCall
from mlxinfer.session.model_params import read_sampling
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def tight() -> Iterator[LiveServer]:
    """Two run, three may wait; and they hear of it."""
    with LiveServer(
        engine={"max_batch": 2}, max_waiting=3, max_waiting_tokens=1500, keep_alive_s=0.05
    ) as server:
        yield server


def test_a_deadline_ends_a_request() -> None:
    with LiveServer(deadline_s=0.2) as server:
        answer = server.post(CHAT, long_chat())
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
        wait_until(server.is_idle)


def test_a_client_may_set_a_deadline(server: LiveServer) -> None:
    short = {"x-request-timeout": "0.1"}
    assert server.post(CHAT, long_chat(), headers=short).status_code == 504
    for bad in ("0", "-1", "nan", "inf", "soon"):
        refused = server.post(CHAT, chat(), headers={"x-request-timeout": bad})
        assert refused.json()["error"]["param"] == "x-request-timeout"


def test_a_deadline_ends_a_stream_with_an_error_event() -> None:
    request = {**long_chat(n=8), "stream": True}
    headers = {"x-request-timeout": "1000"}
    with (
        LiveServer() as server,
        server.client.stream("POST", CHAT, json=request, headers=headers) as response,
    ):
        events = events_of(response)
        next(events)
        server.move_clock(1000)
        *_, last = events
        assert last["error"]["code"] == "deadline_exceeded"
        assert set(last["error"]) == {"message", "type", "param", "code"}
        wait_until(server.is_idle)


def test_a_full_queue_says_when_to_come_back(tight: LiveServer) -> None:
    with tight.stream(CHAT, long_chat(n=3)):
        wait_until(lambda: tight.stats()["running"] == 2)
        wait_until(lambda: tight.service.admission.num_waiting == 1)
        answer = tight.post(CHAT, chat(n=3))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        many_tokens = tight.post(COMPLETIONS, {"prompt": [[5] * 900] * 2, "max_tokens": 1})
        assert many_tokens.status_code == 503
    tight.check_idle()


SILENT: dict[str, tuple[dict[str, Any], str]] = {  # path -> a request, and part of what it hears
    CHAT: (chat(), '"delta":{}'),
    COMPLETIONS: ({"prompt": "A", "max_tokens": 2}, '"text":""'),
    "/v1/messages": (chat(), '"type":"ping"'),
    "/v1/responses": ({"input": "A"}, "event: response.in_progress"),
    "/api/chat": ({**chat(), "model": "demo"}, '"content":""'),
    "/api/generate": ({"prompt": "A", "model": "demo"}, '"response":""'),
    "/completion": ({"prompt": "A", "n_predict": 2}, '"content":""'),
}


@pytest.mark.parametrize("path", SILENT)
def test_silence_is_broken_by_an_event_of_the_api(tight: LiveServer, path: str) -> None:
    """Two long requests take the whole batch; the third one waits, and hears of it twice.

    Clients count neither comments nor, on lines of JSON, nothing at all as a sign of life.
    """
    body, heard = SILENT[path]
    with tight.stream(CHAT, long_chat(n=2)):
        wait_until(lambda: tight.stats()["running"] == 2)
        with tight.stream(path, body) as waiting:
            said = (line for line in waiting.iter_lines() if heard in line)
            assert next(said)
            assert next(said)
    tight.check_idle()


def test_a_client_that_does_not_read_is_left() -> None:
    """Its buffers fill, the server stops waiting, and the request ends before its last token."""
    request = long_chat(stream=True, logprobs=True, top_logprobs=20)
    with LiveServer(send_timeout_s=0.1, send_buffer=4096) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post(CHAT, json.dumps(request).encode()))
        wait_until(lambda: server.stats()["running"] == 1)
        wait_until(server.is_idle)
        assert server.stats()["tokens_sampled"] < 1800
        wait_until(lambda: not server.connections())
        server.check_idle()


def test_a_server_that_ends_lets_requests_finish() -> None:
    request = chat(max_tokens=40, ignore_eos=True)
    with (
        LiveServer(drain_s=20) as server,
        hanging(server, behind=5) as go_on,
        server.stream(CHAT, request) as response,
    ):
        events = events_of(response)
        next(events)
        server.server.stop()
        wait_until(lambda: server.service.draining)
        refused = server.post(CHAT, chat())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        go_on.set()
        assert list(events)[-1] == "[DONE]"
        wait_until(lambda: server.ended)


def test_a_server_that_ends_waits_for_streams_only_so_long() -> None:
    with LiveServer(drain_s=0.1) as server, server.stream(CHAT, long_chat()) as response:
        events = events_of(response)
        next(events)
        server.server.stop()
        assert list(events)[-1]["error"]["code"] == "shutting_down"
        wait_until(lambda: server.ended)


def test_answers_without_a_stream_end_with_the_server_too() -> None:
    with LiveServer(drain_s=0.1) as server:
        with connect(server) as connection:
            connection.sendall(post(CHAT, json.dumps(long_chat()).encode()))
            wait_until(lambda: server.stats()["running"] == 1)
            server.server.stop()
            assert status_of(connection.recv(65536)) == 503
        wait_until(lambda: server.ended)


arrivals = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.integers(1, 50), st.booleans()),
    max_size=40,
)


@given(arrivals=arrivals, limit=st.integers(1, 8), token_limit=st.integers(1, 200))
def test_waiting_requests_and_tokens_stay_within_bounds(
    arrivals: list[tuple[str, int, int, bool]], limit: int, token_limit: int
) -> None:
    """A call enters whole or not at all; only one whose tenant has no other may pass a bound."""
    admission = Admission(limit, token_limit)
    inside: list[tuple[WaitingCall, list[int]]] = []
    for name, count, tokens, leaves in arrivals:
        tenant, mine = Tenant(name), [tokens] * count
        refused: list[OverloadedError] = []
        before = [prompts for _, prompts in inside]
        num, total = sum(map(len, before)), sum(map(sum, before))
        fits = num + count <= limit and total + sum(mine) <= token_limit
        is_first = all(call.tenant != tenant for call, _ in inside)
        call: WaitingCall | None = None
        try:
            call = admission.enter(tenant, mine, refused.append)
        except OverloadedError as full:
            refused = [full]
        assert all(MIN_RETRY_S <= error.retry_after_s <= MAX_RETRY_S for error in refused)
        if call is None:
            assert not fits
            assert not is_first
        else:
            gone = [c for c, _ in inside if not c.tokens]
            assert len(gone) == len(refused)
            assert not (gone and (fits or is_first))
            assert all(c.tenant != tenant for c in gone)
            inside = [pair for pair in inside if pair[0].tokens] + [(call, mine)]
            assert {c.tenant for c in gone} <= {c.tenant for c, _ in inside}, "each keeps a call"
        if leaves and inside:
            call, prompts = inside[0]
            assert admission.leave(call, max(call.tokens))
            prompts.pop()
            inside = inside if prompts else inside[1:]
        left = [prompts for _, prompts in inside]
        assert admission.num_waiting == sum(map(len, left))
        assert [sum(c.tokens.values()) for c, _ in inside] == [sum(prompts) for prompts in left]


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        (None, {}),
        ({}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": "hot", "top_p": 7, "top_k": -1, "min_p": None}, {}),
        ({"top_p": 0, "repetition_penalty": 0}, {}),
        ({"temperature": True}, {}),
    ],
)
def test_defaults_are_the_models_own(
    tmp_path: Path, given_values: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    if given_values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given_values))
    assert read_sampling(tmp_path) == expected
    SamplingParams(**expected)
