"""The bundled model, from the command line: the first thing that a new user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "mlxinfer.cli"]


def answered(*args: str, **environment: str) -> str:
    done = subprocess.run(
        [*COMMAND, *args],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_run_answers_without_any_option() -> None:
    assert len(answered("run", "Hello").split()) > 3


def test_doctor_finds_it_well(tmp_path: Path) -> None:
    report = json.loads(answered("doctor", "--json", HF_HOME=str(tmp_path)))
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert report["ok"]
    assert found["demo model"] == found["generation"] == "ok"
