"""A machine stays awake while requests run: a stand-in for the command notes that it runs."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from live_server import CHAT, LiveServer, chat, long_chat

from mlxinfer.server.service import Awake
from tests.waiting import wait_until

STAND_IN = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('1'); time.sleep(600)"


def stand_in(server: LiveServer, command: tuple[str, ...], release_s: float) -> Awake:
    awake = server.service.awake = Awake(command, release_s)
    return awake


def test_the_machine_is_held_while_requests_run(tmp_path: Path) -> None:
    note = tmp_path / "runs"
    with LiveServer() as server:
        awake = stand_in(server, (sys.executable, "-c", STAND_IN, str(note)), 600.0)
        server.get("/health")
        assert awake._process is None
        held: list[subprocess.Popen[bytes] | None] = []
        for _ in range(2):  # the second finds it held
            assert server.post(CHAT, chat(max_tokens=2)).status_code == 200
            held.append(awake._process)
        assert held[0] is not None
        assert held[0] is held[1]
        process = held[0]
        awake._release_s = 0.2
        with server.stream(CHAT, long_chat()):
            wait_until(note.exists)
            threading.Event().wait(0.5)  # longer than the machine is held without requests
            assert process.poll() is None
        wait_until(lambda: process.poll() is not None)
        held.append(awake._process)
        assert held.pop() is None
        server.post(CHAT, chat(max_tokens=2))
        held.append(awake._process)
    last = held.pop()
    assert last is not None
    assert last.poll() is not None  # the server has ended


@pytest.mark.parametrize("command", [(), ("/no/such/command",)])
def test_requests_are_answered_where_nothing_can_hold_it(command: tuple[str, ...]) -> None:
    with LiveServer(keep_awake=False) as server:
        assert server.service.awake._command == ()
        stand_in(server, command, 0.1)
        for _ in range(2):
            assert server.post(CHAT, chat(max_tokens=2)).status_code == 200
