"""Ctrl-C in the middle of a real `mlxinfer pull`, then the same command again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from standin import StandIn
from standin_fixtures import WEIGHTS

PULL = [sys.executable, "-m", "mlxinfer.cli", "pull", "org/tiny"]


def kept_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*.incomplete"))


def test_an_interrupted_pull_goes_on(standin: StandIn, cache: Path) -> None:
    standin.faults.on_chunk = lambda: time.sleep(0.02)  # 256 KiB take five seconds
    with subprocess.Popen(PULL, env=os.environ, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 30
        while not kept_bytes(cache) and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
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
