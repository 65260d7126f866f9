"""The app on Qt, without a screen: what is drawn, clicked and typed. A process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_driver import missing
from page_server import PageServer

from mlxinfer.server.page.jobs import Job, JobState

pytestmark = pytest.mark.ci

INSTALL = (
    "apt-get install libegl1 libgl1 libxkbcommon0 libdbus-1-3 libfontconfig1 fonts-dejavu-core, "
    'and pip install -e ".[app]"'
)


def require_qt() -> None:
    """Skip where Qt is not installed, or lacks a library of the system."""
    if any(importlib.util.find_spec(name) is None for name in ("toga_qt", "PySide6")):
        missing("Qt", INSTALL)
    tried = subprocess.run(
        [sys.executable, "-c", "import PySide6.QtWidgets"], capture_output=True, text=True
    )
    if tried.returncode:
        missing(f"library that Qt needs: {tried.stderr.strip()[-200:]}", INSTALL)


def width_and_height(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_the_app_is_drawn_clicked_and_typed_into(tmp_path: Path, server: PageServer) -> None:
    require_qt()
    message = {"conversation": "c" * 16, "id": "d" * 16, "role": "user"}
    for number in range(5):
        message |= {"conversation": f"{number}" * 16, "id": f"{number}" * 15 + "a"}
        question = "How do I serve a model to other programs?"
        server.post("/history/messages", {**message, "content": f"{question} {number}"})
    for name, state in (("org/large-model", JobState.RUNNING), ("org/other", JobState.PAUSED)):
        job = Job("download", name, [], [], lambda: None, id=name[-5:], state=state)
        job.done, job.total = 3_100_000_000, 7_200_000_000
        server.routes._library._jobs._jobs[job.id] = job  # type: ignore[union-attr]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("qt_app.py")), server.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        env={
            **os.environ,
            "QT_QPA_PLATFORM": "offscreen",
            "TOGA_BACKEND": "toga_qt",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["problems"] == []
    menu = said["menu"]
    assert menu[0] == "● Ready · demo"
    assert menu[menu.index("Models") + 1][0].startswith("demo: loaded")
    assert "Started by another program; it stops there" in menu[menu.index("Server") + 1]
    assert menu[menu.index("Downloads") + 1][:2] == [
        "org/other: paused, 43 %, 3.1 GB of 7.2 GB",
        ["Resume", "Cancel"],
    ]
    assert menu[-1] == "Quit"
    assert said["main shown"], "the first run ends with a window, not with an icon alone"
    assert (said["click"], said["escape"]) == (True, False)
    assert said["copied"] == f"{server.url}/v1"
    assert (said["closed"], said["second start"], said["shown again"]) == (False, True, True)
    shots = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert len(shots) == 7
    assert width_and_height(shots["chat-without-web-view"]) == (440, 640)
    assert all(len(png) > 3000 for png in shots.values()), "an empty window is smaller"
