"""Two models behind HTTP: loaded by requests, listed while they are not, unloaded by hand."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lazy_server import MB, LazyServer
from live_server import CHAT, chat, long_chat

from mlxinfer.engine.loop import Loop
from mlxinfer.engine.scheduler import Scheduler
from mlxinfer.errors import CheckpointError
from mlxinfer.server.slots import ServedModel
from tests.waiting import wait_until

pytestmark = pytest.mark.demo  # `small` must be another model than `demo`


@pytest.fixture(scope="module")
def lazy() -> Iterator[LazyServer]:
    """Room for one of them at a time."""
    kv = {"kv_bytes": 8 * MB}
    with LazyServer(15 * MB, {"big": kv, "small": {"aliases": ("gpt-4o-mini",), **kv}}) as server:
        yield server


@pytest.fixture
def two(lazy: LazyServer) -> Iterator[LazyServer]:
    """The same server, with nothing loaded."""
    for name in ("big", "small"):
        lazy.post("/admin/models/unload", {"model": name, "drain_s": 5})
    lazy.loads.clear()
    yield lazy
    wait_until(lambda: not lazy.service.calls)
    assert all(slot.users == 0 for slot in lazy.service.models.slots())


def test_models_are_listed_before_they_are_loaded(two: LazyServer) -> None:
    listed = two.get("/v1/models").json()["data"]
    assert [(m["id"], m["state"]) for m in listed] == [("big", "unloaded"), ("small", "unloaded")]
    assert two.get("/v1/models/gpt-4o-mini").json()["id"] == "small"
    assert two.get("/ready").json() == {"status": "ready"}
    assert two.loads == []


def test_a_request_loads_its_model_and_unloads_an_idle_one_for_room(two: LazyServer) -> None:
    answers = [two.post(CHAT, chat(model=name)).json() for name in ("gpt-4o-mini", "big")]
    assert [answer["model"] for answer in answers] == ["small", "big"]
    assert two.loads == ["small", "big"]
    assert two.states() == {"big": "loaded", "small": "unloaded"}
    card = two.get("/v1/models/big").json()
    assert (card["max_model_len"], card["context_length"]) == (2048, 2048)
    able = {name for name, can in card["capabilities"].items() if can}
    assert able == {"chat", "completion", "tools"}
    assert two.get("/v1/models/small").json()["capabilities"] is not None  # as it was when loaded


def test_a_model_that_answers_is_not_unloaded(two: LazyServer) -> None:
    with two.stream(CHAT, long_chat(model="big")) as response:
        lines = response.iter_lines()
        next(lines)
        refused = two.post(CHAT, chat(model="small"))
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert two.states()["big"] == "loaded"
        busy = two.post("/admin/models/unload", {"model": "big"})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "model_busy")


def test_a_load_goes_on_past_the_deadline_of_its_request(two: LazyServer) -> None:
    two.go_on.clear()
    headers = {"x-request-timeout": "1000"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(two.post, CHAT, chat(model="small"), headers=headers)
        wait_until(lambda: two.states()["small"] == "loading")
        two.move_clock(1000)
        late = asked.result()
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert two.states()["small"] == "loading"
    two.go_on.set()
    wait_until(lambda: two.states()["small"] == "loaded")
    assert two.loads == ["small"]


def test_explicit_loads_and_unloads(two: LazyServer) -> None:
    loaded = two.post("/admin/models/load", {"model": "small"}).json()
    assert (loaded["state"], loaded["calls"], loaded["failure"]) == ("loaded", 0, None)
    assert two.post("/admin/models/unload", {"model": "gpt-4o-mini"}).json()["state"] == "unloaded"
    assert two.post("/admin/models/load", {"model": "./elsewhere"}).status_code == 404
    wrong = two.post("/admin/models/unload", {"model": "big", "drain_s": -1})
    assert wrong.json()["error"]["param"] == "drain_s"


def test_a_model_is_loaded_again_a_while_after_its_engine_ended_in_a_fault() -> None:
    """Not even a fresh start worked: the server says so, and helps itself after a pause."""

    tried_again = threading.Event()

    def no_memory(_: Loop) -> None:
        raise MemoryError("no room for a new cache")

    def still_none(_: Loop) -> None:
        tried_again.set()
        no_memory(_)

    with LazyServer() as server:
        alone = server.post(CHAT, chat(model="small")).json()["choices"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "next_batch", no_memory)
            patch.setattr(Loop, "assemble", still_none)
            assert server.post(CHAT, chat(model="small")).status_code == 500
            assert tried_again.wait(60)  # the requests are answered before
        wait_until(lambda: server.states()["small"] == "unloaded")
        assert server.get("/ready").status_code == 200, "others are answered"
        refused = server.post(CHAT, chat(model="small"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        server.clock_s += 10
        assert server.post(CHAT, chat(model="small")).json()["choices"] == alone
        assert server.loads == ["small", "small"]


def test_a_model_that_cannot_be_loaded_is_a_503_that_says_when(tmp_path: Path) -> None:
    def broken(_: int) -> ServedModel:
        raise CheckpointError(f"{tmp_path} is broken")

    with LazyServer(fields={"big": {"load": broken}}) as server:
        first, second = (server.post(CHAT, chat(model="big")) for _ in range(2))
        assert [first.status_code, second.status_code] == [503, 503]
        assert 1 <= int(second.headers["retry-after"]) <= int(first.headers["retry-after"]) == 10
        error = second.json()["error"]
        assert error["code"] == "model_load_failed"
        assert "is tried again in 10 seconds" in error["message"]
        assert str(tmp_path) not in second.text
        told = server.get("/admin/models").json()["models"][0]
        assert (told["failures_in_a_row"], 0 < told["retry_left_s"] <= 10) == (1, True)
        assert server.post(CHAT, chat(model="small")).status_code == 200
        assert server.post("/admin/models/load", {"model": "big"}).status_code == 400


def test_a_model_with_a_broken_adapter_answers_without_it(tmp_path: Path) -> None:
    with LazyServer(fields={"big": {"adapters": {"lost": tmp_path / "lost"}}}) as server:
        assert server.post(CHAT, chat(model="big")).status_code == 200
        refused = server.post(CHAT, chat(model="big:lost"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
        assert str(tmp_path) not in refused.text
        cards = {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}
        assert (cards["big"], cards["big:lost"]) == ("loaded", "failed")
        state = server.get("/admin/models").json()["models"][0]
        assert (state["failure"], list(state["adapter_failures"])) == (None, ["lost"])
        unload = {"lora_name": "lost", "base_model_name": "big"}
        assert server.post("/v1/unload_lora_adapter", unload).status_code == 200
        assert server.get("/admin/models").json()["models"][0]["adapter_failures"] == {}
