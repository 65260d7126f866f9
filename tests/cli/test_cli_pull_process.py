"""Ctrl-C in the middle of a real download by `pull` or `run`, then `pull` again."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from standin import StandIn
from standin_fixtures import WEIGHTS

from tests.waiting import wait_until

pytestmark = pytest.mark.ci

MLXINFER = [sys.executable, "-m", "mlxinfer.cli"]
PULL = [*MLXINFER, "pull", "org/tiny"]
RUN = [*MLXINFER, "run", "-m", "org/tiny", "hello"]


def kept_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*.incomplete"))


def wait_for_bytes(cache: Path) -> None:
    wait_until(lambda: kept_bytes(cache))


@pytest.mark.parametrize("command", [PULL, RUN], ids=["pull", "run"])
def test_an_interrupted_download_goes_on(command: list[str], standin: StandIn, cache: Path) -> None:
    standin.faults.on_chunk = lambda: time.sleep(0.02)  # 256 KiB take five seconds
    with subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE) as process:
        wait_for_bytes(cache)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    kept = kept_bytes(cache)
    [partial] = cache.rglob("*.incomplete")
    assert WEIGHTS.startswith(partial.read_bytes())
    assert 0 < kept < len(WEIGHTS)

    standin.faults.on_chunk = None
    done = subprocess.run(PULL, env=os.environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert standin.asked_for(f"bytes={kept}-")
    [weights] = cache.rglob("model.safetensors")
    assert weights.read_bytes() == WEIGHTS


def test_rm_leaves_a_pull_that_runs_alone(standin: StandIn, cache: Path) -> None:
    go_on = threading.Event()
    standin.faults.on_chunk = lambda: kept_bytes(cache) and go_on.wait(60)
    with subprocess.Popen(PULL, env=os.environ, stderr=subprocess.PIPE) as process:
        wait_for_bytes(cache)
        remove = [*MLXINFER, "rm", "--yes", "org/tiny"]
        refused = subprocess.run(remove, env=os.environ, capture_output=True, text=True)
        go_on.set()
        _, errors = process.communicate(timeout=60)
    assert refused.returncode == 1
    assert "org/tiny is being downloaded by another process" in refused.stderr
    assert (process.returncode, errors) == (0, b"")
    subprocess.run(remove, env=os.environ, check=True)
    assert not list(cache.rglob("model.safetensors"))
