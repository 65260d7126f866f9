"""A rank that dies or hangs: its requests end with a clear error, soon, whatever was under way.

Each in a process of its own, since a group fails for good. pytest -m slow tests/ranks
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from models.tiny import tiny_checkpoint, tiny_config
from speculation.head_checkpoints import eagle_checkpoint

SCRIPT = """
import json, os, queue, signal, sys, time
from pathlib import Path

from mlxinfer.core import Request, SamplingParams
from mlxinfer.ranks import group, open as opened
from mlxinfer.session.engine_factory import EngineOptions, open_engine

folder, when, how, pipeline = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "stages"
head = {"draft": sys.argv[5], "speculate": "eagle"} if len(sys.argv) > 5 else {}
group.SILENCE_S = 3.0


class Owner:
    pass


owner, options = Owner(), EngineOptions.of(
    {"ranks": 2, "max_memory": "64MB", "pipeline": pipeline, **head}, Path
)
engine, _ = open_engine("tiny", folder, options, owner=owner)
events, drafted = queue.SimpleQueue(), 0
params = SamplingParams(max_tokens=900, ignore_eos=True)
if when != "idle":
    ids = [3 + i % 80 for i in range(5 if when == "decode" else 3000)]
    engine.submit(Request("a", ids, params, frozenset()), events.put)
    if when == "decode":
        [events.get(timeout=60) for _ in range(60)]
        drafted = engine.stats()["speculation"]["drafted"] if head else 0
began = time.monotonic()
os.kill(opened._open[0]._local.pids[1], getattr(signal, how))
found = {"error": "EngineClosedError", "says": ""}
if when != "idle":
    event = events.get(timeout=60)
    while event.finish_reason is None:
        event = events.get(timeout=60)
    found = {"error": type(event.error).__name__, "says": str(event.error)}
while not engine.closed and time.monotonic() < began + 60:
    time.sleep(0.02)
found |= {"seconds": time.monotonic() - began, "drafted": drafted}
try:
    engine.submit(Request("b", [3, 4], params, frozenset()), events.put)
except Exception as error:
    found["later"] = f"{type(error).__name__}: {error}"
engine.close()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how"),
    [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("idle", "SIGKILL"), ("decode", "SIGSTOP")],
)
@pytest.mark.parametrize("form", ["parts", "stages"])
@pytest.mark.parametrize("head", [False, True], ids=["plain", "with a head"])
def test_requests_of_a_failed_group_end_with_a_clear_error(
    head: bool, form: str, when: str, how: str, tmp_path: Path
) -> None:
    """`head`: EAGLE-3, for which hidden states come back from stages."""
    folder = tiny_checkpoint(tmp_path / "model", "llama-v4")
    heads = [eagle_checkpoint(tmp_path / "head", tiny_config("llama-v4"), drafted=40)]
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), when, how, form, *map(str, heads * head)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] in ("EngineClosedError", "RanksFailedError"), found
    assert "ranks of this model failed" in found["later"], found
    assert found["seconds"] < 30, found
    assert bool(found["drafted"]) == (head and when == "decode"), found
