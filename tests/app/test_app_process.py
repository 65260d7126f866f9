"""A server as a process of its own: started, found again, ended, and its crash noticed."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.processes import free_port
from mlxinfer.app.controller import AppController, Phase
from mlxinfer.app.process import ServerProcess, StartError, start_of
from mlxinfer.app.settings import Settings
from tests.waiting import wait_until

pytestmark = pytest.mark.ci

DEADLINE_S = 60


def app(folder: Path, notices: list[tuple[str, str]], port: int) -> AppController:
    """The app as it starts: a new controller over the same folder."""
    controller = AppController(folder, ServerProcess(folder), lambda *said: notices.append(said))
    controller.change(Settings(url=f"http://127.0.0.1:{port}"))
    return controller


def pid_of(folder: Path) -> int:
    import json

    return int(json.loads((folder / "server.json").read_text())["pid"])


def test_a_server_outlives_the_app_that_started_it_and_obeys_the_next(tmp_path: Path) -> None:
    notices: list[tuple[str, str]] = []
    port = free_port()
    first = app(tmp_path, notices, port)
    assert first.refresh().phase is Phase.STOPPED
    first.start()
    assert first.refresh().phase in (Phase.STARTING, Phase.RUNNING)
    wait_until(lambda: first.refresh().phase is Phase.RUNNING, DEADLINE_S)
    assert first.view.ours
    pid = pid_of(tmp_path)
    assert os.getsid(pid) == pid, "it has a session of its own, so no terminal ends it"
    first.start()
    assert pid_of(tmp_path) == pid, "one that answers is not started again"

    second = app(tmp_path, notices, port)  # the first app has been quit
    assert second.refresh().phase is Phase.RUNNING
    assert second.view.ours
    os.kill(pid, signal.SIGKILL)
    first._process._child.wait()  # type: ignore[union-attr]  # init does it for an app that is gone
    wait_until(lambda: second.refresh().phase is Phase.STOPPED)
    assert [title for title, _ in notices] == ["The server has ended"]
    assert "has ended" in second.view.problem
    assert not second.view.ours

    second.start()
    wait_until(lambda: second.refresh().phase is Phase.RUNNING, DEADLINE_S)
    assert second.view.problem == ""
    second.end()
    assert second.refresh().phase is Phase.RUNNING, "to quit the app ends no server unasked"
    second.stop()
    assert second.refresh().phase is Phase.STOPPED
    assert len(notices) == 1, "an end that was asked for is no news"
    assert not (tmp_path / "server.json").exists()

    second.change(replace(second.settings, stop_server=True))
    second.get("demo")
    assert [model.state for model in second.refresh().activity.models] == ["loaded"]
    second.end()
    wait_until(lambda: second.refresh().phase is Phase.STOPPED, DEADLINE_S)


def test_a_port_that_is_taken_is_said_in_the_server_s_words(tmp_path: Path) -> None:
    notices: list[tuple[str, str]] = []
    with socket.socket() as taken:  # listens, and never answers
        taken.bind(("127.0.0.1", 0))
        taken.listen(0)
        port = taken.getsockname()[1]
        process = ServerProcess(tmp_path)
        process.start(f"http://127.0.0.1:{port}", port, {})
        wait_until(lambda: not process.alive(), DEADLINE_S)
        said = process.forget()
    assert f"Cannot serve on 127.0.0.1 port {port}" in said
    assert notices == []


def test_a_process_that_ends_at_once_is_reported_with_its_status(tmp_path: Path) -> None:
    process = ServerProcess(tmp_path, [sys.executable, "-c", "raise SystemExit(3)"])
    process.start("http://127.0.0.1:1", 1, {})
    wait_until(lambda: not process.alive())
    assert process.forget() == "its process ended with status 3"
    with pytest.raises(StartError, match="cannot be started"):
        ServerProcess(tmp_path, ["/nonexistent/program"]).start("http://127.0.0.1:1", 1, {})


def test_one_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    process = ServerProcess(tmp_path, [sys.executable, "-c", f"{deaf}; time.sleep(60)"])
    process.start("http://127.0.0.1:1", 1, {})
    wait_until(lambda: process.log_path.read_text() != "")
    with pytest.raises(StartError, match="runs already"):
        process.start("http://127.0.0.1:1", 1, {})
    process.stop(timeout_s=0.2)
    assert not process.alive()


def test_a_process_id_that_was_given_to_another_program_is_not_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started_s = start_of(other.pid)
        assert started_s is not None
        assert abs(started_s - time.time()) < 60
        record = tmp_path / "server.json"
        record.write_text(
            f'{{"pid": {other.pid}, "started_s": {started_s - 100}, "url": "http://127.0.0.1:1"}}'
        )
        process = ServerProcess(tmp_path)
        process.attach()
        process.stop()
        assert other.poll() is None
        assert not record.exists()
        other.communicate(b"\n")


def test_a_broken_record_is_no_server(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '{"pid": "x"}', '{"pid": 1}'):
        (tmp_path / "server.json").write_text(content)
        process = ServerProcess(tmp_path)
        process.attach()
        assert not process.alive(), content
