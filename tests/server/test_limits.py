"""What one client may store, ask for, and have run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import CHAT, LiveServer, chat
from test_sessions import ask, error_of, serving

from mlxinfer import history as history_module
from mlxinfer.engine import kv_manager
from mlxinfer.history import History
from mlxinfer.mcp_tools import McpTools
from mlxinfer.server.app import ROUTES
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.page.routes import PageRoutes, ToolRoutes

TALKS = "/history/conversations"


class PageServer(LiveServer):
    """A server with some routes of the page."""

    def __init__(self, *routes: Any) -> None:
        self.routes_served = (*ROUTES, *routes)
        super().__init__()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[PageServer, History]]:
    history = History(tmp_path / "history.db")
    with PageServer(*PageRoutes(history).routes()) as server:
        yield server, history
    history.close()


def say(server: LiveServer, number: int, text: str) -> Any:
    talk = f"conversation{number}"
    message = {"id": f"message-{number:06}", "role": "user", "content": text}
    return server.post("/history/messages", {"conversation": talk, **message})


def test_text_of_a_history_has_a_quota_and_deleting_makes_room(
    stored: tuple[PageServer, History], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = stored
    monkeypatch.setattr(history_module, "MAX_TEXT_BYTES", 2_000)
    assert say(server, 1, "a" * 1_500).status_code == 200
    refused = say(server, 2, "b" * 1_500)
    assert "delete some" in error_of(refused, 507)
    assert refused.json()["error"]["code"] == "storage_full"
    assert server.get(f"{TALKS}/conversation2").status_code == 404, "nothing of it is stored"
    assert server.client.delete(f"{TALKS}/conversation1").status_code == 200
    assert say(server, 3, "b" * 1_500).status_code == 200


def test_settings_of_a_conversation_have_a_limit(stored: tuple[PageServer, History]) -> None:
    server, _ = stored
    fits = {"id": "conversation1", "settings": {"system": "x" * 1_000_000}}
    assert server.post(TALKS, fits).status_code == 200
    large = {"id": "conversation1", "settings": {"system": "x" * (1 << 20)}}
    refused = server.post(TALKS, large)
    error_of(refused, 400)
    assert refused.json()["error"]["param"] == "settings"
    kept = server.get(f"{TALKS}/conversation1").json()
    assert len(str(kept)) < 1_001_000


def test_on_a_full_disk_only_deleting_works(stored: tuple[PageServer, History]) -> None:
    server, history = stored
    for number in range(20):
        assert say(server, number, f"{number} " * 1_000).status_code == 200
    with history._file.use() as db:  # as SQLite finds a disk that is full
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
    refused = say(server, 30, "c" * 1_000_000)
    assert "disk is full" in error_of(refused, 507)
    assert server.client.delete(f"{TALKS}/conversation3").status_code == 200
    assert server.get(f"{TALKS}/conversation3").status_code == 404
    assert server.get(f"{TALKS}/conversation4").status_code == 200


class Tools(McpTools):
    """Two tools, of which the config file allows one."""

    def __init__(self) -> None:
        super().__init__({})
        self.called: list[str] = []

    def allows(self, name: str) -> bool:
        return name == "add"

    def call(self, name: str, arguments: str) -> str:
        self.called.append(name)
        return "done"


def test_a_tool_runs_only_if_the_file_allows_it_or_a_person_agreed() -> None:
    tools = Tools()
    routes = ToolRoutes(tools)
    with PageServer(*routes.routes()) as server:
        assert server.post("/page/tools", {"name": "add"}).json() == {"text": "done"}
        for consent in ({}, {"consent": False}):
            refused = server.post("/page/tools", {"name": "home", **consent})
            error_of(refused, 403)
            assert refused.json()["error"]["code"] == "consent_required"
        assert tools.called == ["add"]
        agreed = server.post("/page/tools", {"name": "home", "consent": True})
        assert (agreed.status_code, tools.called) == (200, ["add", "home"])
    routes.close()


def test_slots_are_remembered_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_manager, "MAX_PLACES", 3)
    anna, ben = ({"authorization": f"Bearer {name}-key-{name * 4}"} for name in ("anna", "ben"))
    tables = {n: {"key": f"{n}-key-{n * 4}"} for n in ("anna", "ben")}
    keys = ApiKeys().with_named(tables, "keys")
    with serving(tmp_path, keys=keys) as server:
        ask(server, headers=ben, id_slot=0)
        for slot in range(5):
            ask(server, f"{slot} " * 40, headers=anna, id_slot=slot)
        for slot, headers, status in ((0, anna, 400), (4, anna, 200), (0, ben, 200)):
            body = {"name": f"slot{slot}", "id_slot": slot}
            assert server.post("/v1/sessions", body, headers=headers).status_code == status


def test_texts_of_logit_bias_have_limits(server: LiveServer) -> None:
    for biases, said in (
        ([["a" * 1_000, 1.0]] * 101, "101,000 characters"),
        ([["a" * 1_001, 1.0]], "1000"),
        ([["a", 1.0]] * 10_001, "10000"),
    ):
        refused = server.post(CHAT, chat("Hello", logit_bias=biases))
        assert said in error_of(refused, 400)
        assert refused.json()["error"]["param"].startswith("logit_bias")
    many = [[f"w{number}", 0.5] for number in range(10_000)]
    assert server.post(CHAT, chat("Hello", logit_bias=many, max_tokens=1)).status_code == 200
