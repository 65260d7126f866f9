"""`mlxinfer serve` with its page, as people start it; and the demo model, held to a schema."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from page_driver import PageDriver
from page_server import LivePageServer

from mlxinfer.history import History

pytestmark = pytest.mark.ci

SECRET = "a very private question"


def test_messages_survive_a_kill_of_the_server_and_are_in_no_log(tmp_path: Path) -> None:
    place = tmp_path / "data" / "history.db"
    command = [sys.executable, "-m", "mlxinfer.cli", "serve", "--port", "0", "--ttl", "9m"]
    with subprocess.Popen(
        [*command, "--log-level", "debug"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLXINFER_HISTORY": str(place)},
    ) as process:
        match = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert match
        message = {"conversation": "a-conversation", "id": "a-message", "role": "user"}
        with httpx.Client(base_url=match.group(), timeout=30) as client:
            saved = client.post("/history/messages", json={**message, "content": SECRET})
            assert (saved.status_code, saved.json()["title"]) == (200, SECRET)
            hits = client.get("/history/search", params={"q": "private question"}).json()["data"]
            assert [hit["message"] for hit in hits] == ["a-message"]
            wrong = client.post("/history/messages", json={**message, "content": 7})
            assert wrong.status_code == 400
            settings = client.get("/admin/settings").json()["data"]
        process.kill()
        log = process.stderr.read()
    assert SECRET not in log
    assert "private" not in log
    assert {"name": "ttl", "value": "9m", "origin": "command line"} in settings
    assert [m.content for m in History(place).messages("", "a-conversation")] == [SECRET]


def test_an_answer_of_the_demo_holds_to_a_schema_and_says_so(profile: Any, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}, "ok": {"type": "boolean"}},
        "required": ["sky", "ok"],
        "additionalProperties": False,
    }
    with LivePageServer(tmp_path) as server, PageDriver(profile, server) as page:
        page.open()
        page.click("Settings of this conversation")
        page.settings.get_by_label("Answers are").select_option("schema")
        page.settings.get_by_label("Schema", exact=True).fill(json.dumps(schema))
        page.click("Close the settings")
        answer = page.answered("What colour is the sky?")
        said = json.loads(answer.locator(".markdown").inner_text())
        assert said["sky"] in ("blue", "grey")
        assert type(said["ok"]) is bool
        assert "holds to the schema: guaranteed" in page.facts(answer)
        form_of_last = "response_format"
        page.click("Copy this answer")
        page.get_by_role("button", name="cURL").click()
        page.wait_for("navigator.clipboard.readText().then(t => t.startsWith('curl'))")
        assert form_of_last in page.clipboard()
