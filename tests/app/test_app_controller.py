"""The app's view of its server over HTTP, and its actions."""

import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from page_server import PageServer
from standin import Repo, StandIn
from test_page_models import DEMO

from mlxinfer.app.client import ServerClient
from mlxinfer.app.controller import AppController, Phase
from mlxinfer.app.process import ServerProcess, StartError
from mlxinfer.app.settings import Settings
from mlxinfer.errors import MlxinferError
from mlxinfer.server.keys import ApiKeys
from tests.http_site import http_site
from tests.waiting import wait_until


def talk(server: PageServer, text: str) -> None:
    """Have a conversation of one message."""
    message = {"conversation": secrets.token_hex(8), "id": secrets.token_hex(8), "role": "user"}
    assert server.post("/history/messages", {**message, "content": text}).status_code == 200


def test_a_running_server_is_used_and_kept(controller: AppController, server: PageServer) -> None:
    talk(server, "first question")
    view = controller.refresh()
    assert (view.phase, view.ours) == (Phase.RUNNING, False)
    assert [model.name for model in view.activity.models] == ["demo"]
    assert "demo-vision" in view.on_disk
    assert "demo-draft" not in view.on_disk  # it only proposes tokens for another
    assert [chat.title for chat in view.chats] == ["first question"]
    controller.start()
    controller.stop()
    assert controller.refresh().phase is Phase.RUNNING


def test_models_are_loaded_and_unloaded(controller: AppController, server: PageServer) -> None:
    client = controller.client
    client.serve("demo-draft")
    client.load("demo-draft")
    client.pin("demo-draft", True)
    by_name = {model.name: model for model in controller.refresh().activity.models}
    assert (by_name["demo-draft"].state, by_name["demo-draft"].pinned) == ("loaded", True)
    client.pin("demo-draft", False)
    client.unload("demo-draft")
    view = controller.refresh(everything=True)
    assert view.activity.models[-1].state == "unloaded"
    assert "demo-draft" not in view.on_disk
    with pytest.raises(MlxinferError, match="no model"):
        client.load("nothing")


def test_tokens_a_second_follow_from_counts(controller: AppController, server: PageServer) -> None:
    server.script.says("word " * 30)
    assert controller.refresh().rate is None
    before = controller.view.activity.tokens
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go"}]})
    view = controller.refresh()
    assert view.activity.tokens > before
    assert view.rate is not None
    assert view.rate > 0


def test_a_request_that_runs_is_counted(controller: AppController, server: PageServer) -> None:
    server.script.says("begun", rest="never")
    body = {"messages": [{"role": "user", "content": "Go"}]}
    asking = threading.Thread(target=server.post, args=("/v1/chat/completions", body))
    asking.start()
    wait_until(lambda: controller.refresh().activity.running == 1)
    server.script.go_on.set()
    asking.join()
    wait_until(lambda: controller.refresh().activity.running == 0)


def test_a_prompt_shows_share_and_time(controller: AppController, server: PageServer) -> None:
    server.script.read = (100, 3.0)
    body = {"messages": [{"role": "user", "content": "word " * 500}]}
    streamed = {**body, "stream": True, "return_progress": True}
    asking = threading.Thread(target=server.post, args=("/v1/chat/completions", streamed))
    asking.start()
    wait_until(lambda: controller.refresh().activity.reading != ())
    [(read, total, left_s)] = controller.view.activity.reading
    assert read == 100
    assert total > 500
    assert left_s == pytest.approx(3.0 * (total - 100) / 100)
    server.script.go_on.set()
    asking.join()
    wait_until(lambda: not controller.refresh().activity.busy)


def download(server: PageServer, model: str) -> None:
    """What the page does."""
    assert server.post("/hub/downloads", {"model": model}).status_code == 200


def test_a_download_is_paused_resumed_and_its_end_is_notified(
    controller: AppController, server: PageServer, standin: StandIn, notices: list[tuple[str, str]]
) -> None:
    standin.repos["org/app-chat"] = Repo(dict(DEMO))
    standin.faults.on_chunk = lambda: time.sleep(0.005)
    client = controller.client
    download(server, "org/app-chat")

    def state() -> str:
        return controller.refresh().transfers[0].state

    wait_until(lambda: state() == "running" and controller.view.transfers[0].done > 0)
    client.act(controller.view.transfers[0].id, "pause")
    wait_until(lambda: state() == "paused")
    assert notices == []
    standin.faults.on_chunk = None
    client.act(controller.view.transfers[0].id, "resume")
    wait_until(lambda: state() == "done")
    assert notices == [("Download complete", "org/app-chat")]
    controller.refresh(everything=True)
    assert "org/app-chat" in controller.view.on_disk
    assert len(notices) == 1


@pytest.mark.ci
def test_a_model_is_downloaded_served_and_loaded_by_one_action(
    controller: AppController, server: PageServer, standin: StandIn
) -> None:
    standin.repos["org/app-get"] = Repo(dict(DEMO))
    controller.get("org/app-get")
    states = {model.name: model.state for model in controller.refresh().activity.models}
    assert states["org/app-get"] == "loaded"
    controller.client.unload("org/app-get")
    standin.faults.gate_files = True
    standin.repos["org/app-gated"] = Repo(dict(DEMO))
    with pytest.raises(StartError, match="gated"):
        controller.get("org/app-gated")


@pytest.mark.ci
def test_a_cancelled_download_ends_the_wait_for_its_model(
    controller: AppController, server: PageServer, standin: StandIn
) -> None:
    standin.repos["org/app-left"] = Repo(dict(DEMO))
    standin.faults.on_chunk = lambda: time.sleep(0.05)
    waiting = threading.Thread(target=controller.get, args=("org/app-left",))
    waiting.start()

    def found() -> list[str]:
        return [t.id for t in controller.refresh().transfers if t.name == "org/app-left"]

    wait_until(lambda: bool(found()))
    controller.client.act(found()[0], "cancel")
    standin.faults.on_chunk = None
    waiting.join(60)
    assert not waiting.is_alive()
    assert not controller.client.has("org/app-left")


@pytest.mark.ci
def test_a_failed_download_is_notified_with_its_reason(
    controller: AppController, server: PageServer, notices: list[tuple[str, str]], standin: StandIn
) -> None:
    standin.faults.gate_files = True
    download(server, "org/tiny")
    wait_until(lambda: controller.refresh().transfers[0].state == "failed")
    [(title, text)] = notices
    assert title == "Download failed"
    assert "gated" in text


def test_a_server_with_keys_asks_for_one(tmp_path: Path) -> None:
    with PageServer(tmp_path / "page", keys=ApiKeys.from_plain(["secret"])) as server:
        controller = AppController(tmp_path, ServerProcess(tmp_path), lambda *_: None)
        controller.change(Settings(url=server.url))
        assert controller.refresh().phase is Phase.LOCKED
        controller.change(replace(controller.settings, key="secret"))
        assert ServerClient(server.url, "secret").activity().models
        assert controller.refresh().phase is Phase.RUNNING


def test_another_program_at_the_address_is_said_and_left_alone(tmp_path: Path) -> None:
    for answer in (b"<h1>Hello</h1>", b'{"requests": 1}', b"[]"):
        with http_site(lambda _, answer=answer: (200, {}, [answer])) as url:
            controller = AppController(tmp_path, ServerProcess(tmp_path), lambda *_: None)
            controller.change(Settings(url=url))
            assert controller.refresh().phase is Phase.FOREIGN, answer
            with pytest.raises(StartError, match="Another program answers"):
                controller.start()
            assert not (tmp_path / "server.json").exists()


def test_a_server_is_started_on_this_machine_alone(tmp_path: Path) -> None:
    controller = AppController(tmp_path, ServerProcess(tmp_path), lambda *_: None)
    controller.change(Settings(url="http://studio.invalid:8080"))
    with pytest.raises(StartError, match="another machine"):
        controller.start()
    assert controller.refresh().phase is Phase.STOPPED
