"""/health and /ready: a token proves it, and an engine that hangs is found out in time."""

import socket
import threading
from collections.abc import Iterator

import pytest
from lazy_server import LazyServer
from live_server import CHAT, LiveServer, chat, long_chat
from steps import break_next_step, hanging

from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.service import FRESH_S
from tests.waiting import wait_until

pytestmark = pytest.mark.demo  # `small` must be another model than `demo`


@pytest.fixture(scope="module")
def quick() -> Iterator[LiveServer]:
    """A server that loses patience after a moment: for engines that hang."""
    with LiveServer(ready_deadline_s=0.4) as server:
        yield server
        server.check_idle()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question is answered anew."""
    monkeypatch.setattr("mlxinfer.server.service.FRESH_S", -1.0)


def test_an_idle_engine_makes_a_token(server: LiveServer) -> None:
    before = server.stats()["tokens_sampled"]
    answer = server.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert server.stats()["tokens_sampled"] == before + 1


def test_a_busy_engine_is_asked_for_steps_not_for_tokens(server: LiveServer) -> None:
    with server.stream(CHAT, long_chat(n=3)):
        wait_until(lambda: server.stats()["running"] == 3)
        requests = server.stats()["requests"]
        assert server.get("/ready").status_code == 200
        assert server.stats()["requests"] == requests


def test_an_idle_engine_that_hangs_is_found_out(quick: LiveServer) -> None:
    with hanging(quick):
        answer = quick.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "stuck"})
        assert int(answer.headers["retry-after"]) > 0
        assert quick.get("/health").status_code == 200
        assert quick.get("/metrics").status_code == 200
        assert quick.get("/ready").status_code == 503  # and costs no second thread
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("mlxinfer-stats") <= 1
    wait_until(lambda: quick.get("/ready").status_code == 200)


def test_a_busy_engine_that_hangs_is_found_out(quick: LiveServer) -> None:
    with quick.stream(CHAT, long_chat()):
        with hanging(quick):
            assert quick.get("/ready").json() == {"status": "stuck"}
        wait_until(lambda: quick.get("/ready").status_code == 200)


def test_an_engine_that_fails_is_not_ready(server: LiveServer) -> None:
    break_next_step(server)
    answer = server.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "failing"})
    assert server.get("/ready").status_code == 200


def test_to_ask_often_costs_one_token(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.server.service.FRESH_S", 60.0)
    assert FRESH_S < 5
    server.service.readiness._running = None
    before = server.stats()["requests"]
    assert [server.get("/ready").status_code for _ in range(5)] == [200] * 5
    assert server.stats()["requests"] == before + 1


def test_no_key_is_needed_and_nothing_is_told() -> None:
    with LiveServer(keys=ApiKeys.from_plain(["secret"])) as server:
        assert server.get("/health").json() == {"status": "ok"}
        assert server.get("/ready").json() == {"status": "ready"}
        assert server.get("/metrics").status_code == 401


def test_small_answers_are_sent_at_once(server: LiveServer) -> None:
    """Not after the client's delayed acknowledgement, 40 ms later."""
    server.get("/health")
    for connection in server.server.server_state.connections:
        transport = connection.transport
        connected = transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_loading_is_not_ready_and_nothing_is_loaded_by_asking() -> None:
    server = LazyServer(fields={"big": {"pinned": True}})
    server.go_on.clear()
    with server:
        answer = server.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        assert int(answer.headers["retry-after"]) > 0
        server.go_on.set()
        wait_until(lambda: server.get("/ready").status_code == 200)
        assert server.loads == ["big"]
        assert server.states()["small"] == "unloaded"


def test_draining_is_not_ready() -> None:
    with LiveServer(drain_s=10) as server, server.stream(CHAT, long_chat()):
        server.server.stop()
        wait_until(lambda: server.service.draining)
        assert server.get("/ready").json() == {"status": "draining"}
        assert server.post(CHAT, chat()).status_code == 503
        assert server.post("/admin/models/load", {"model": "demo"}).status_code == 503
        assert server.get("/health").status_code == 200


def test_a_router_sees_the_load(server: LiveServer) -> None:
    assert server.post(CHAT, chat()).status_code == 200
    result = server.get("/v1/loads").json()
    (load,) = result["loads"]
    assert load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"] == 0
    assert 0 <= load["token_usage"] <= 1
    assert load["max_total_num_tokens"] > 0
    assert server.get("/server_info").json()["served_model_name"] == "demo"
