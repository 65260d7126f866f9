"""A rank that dies or hangs: its requests end with a clear error, soon, whatever was under way.

Each in a process of its own, since a group fails for good. pytest -m slow tests/ranks
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from models.tiny import config_of, tiny_checkpoint, tiny_config
from speculation.head_checkpoints import eagle_checkpoint

SCRIPT = """
import json, os, queue, signal, sys, time
from pathlib import Path

from mlxinfer.core import Request, SamplingParams
from mlxinfer.ranks import group
from mlxinfer.session.engine_factory import open_engine
from mlxinfer.session.options import EngineOptions

folder, when, how, pipeline = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "stages"
head = {"draft": sys.argv[5], "speculate": "eagle"} if len(sys.argv) > 5 else {}
group.SILENCE_S = 3.0


class Owner:
    pass


owner, options = Owner(), EngineOptions(
    ranks=2, max_memory="64MB", pipeline=pipeline, **head
)
engine, _ = open_engine("tiny", folder, options, owner=owner)
events, drafted = queue.SimpleQueue(), 0
params = SamplingParams(max_tokens=900, ignore_eos=True)
if when != "idle":
    ids = [3 + i % 80 for i in range(5 if when == "decode" else 3000)]
    engine.submit(Request("a", ids, params, frozenset()), events.put)
    for name in ("b", "c"):  # stages have steps of each in flight
        engine.submit(Request(name, ids[:5], params, frozenset()), lambda event: None)
    if when == "decode":
        [events.get(timeout=60) for _ in range(60)]
        drafted = engine.stats()["speculation"]["drafted"] if head else 0
began = time.monotonic()
os.kill(group._open[0]._local._processes[1].pid, getattr(signal, how))
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
    engine.submit(Request("d", [3, 4], params, frozenset()), events.put)
except Exception as error:
    found["later"] = f"{type(error).__name__}: {error}"
engine.close()
print(json.dumps(found))
"""

KILLS = [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("idle", "SIGKILL"), ("decode", "SIGSTOP")]
HUNG = (True, "stages", "prefill", "SIGKILL")  # once, at the end of the engine


@pytest.mark.parametrize(
    ("head", "form", "when", "how"),
    [
        pytest.param(*case, marks=pytest.mark.ci if case == HUNG else pytest.mark.slow)
        for head, form, kill in product([False, True], ["parts", "stages"], KILLS)
        for case in [(head, form, *kill)]
    ],
)
def test_requests_of_a_failed_group_end_with_a_clear_error(
    head: bool, form: str, when: str, how: str, tmp_path: Path
) -> None:
    """`head`: EAGLE-3, for which hidden states come back from stages."""
    folder = tiny_checkpoint(tmp_path / "model", "llama-v4")
    heads = [eagle_checkpoint(tmp_path / "head", tiny_config("llama-v4"), drafted=40)]
    config_of(folder, max_position_embeddings=4096)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), when, how, form, *map(str, heads * head)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads(done.stdout.splitlines()[-1])
    assert content["error"] in ("EngineClosedError", "RanksFailedError"), content
    assert "ranks of this model failed" in content["later"], content
    assert content["seconds"] < 30, content
    assert bool(content["drafted"]) == (head and when == "decode"), content


PREFIXES = """
import json, os, signal, sys
from mlxinfer import LLM, SamplingParams

pipeline, folder, die = sys.argv[1] == "stages", sys.argv[2], sys.argv[3] == "die"
disk = {"disk_cache": "64MB", "disk_cache_dir": folder}
llm = LLM("demo", ranks=2, pipeline=pipeline, num_pages=40, **disk)
params = SamplingParams(max_tokens=8, temperature=0)
ids = [[3 + (7 * i + seed) % 900 for i in range(400)] for seed in range(4)]
answers = [llm.generate([own], params)[0] for own in (ids if die else ids[:1])]
print(json.dumps({"text": answers[0].text, "cached": answers[0].cached_tokens}), flush=True)
if die:
    os.kill(os.getpid(), signal.SIGKILL)
llm.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parts", "stages"])
def test_prefixes_on_disk_are_found_after_a_kill(form: str, tmp_path: Path) -> None:
    """What was evicted before is on the disks of both ranks; what one lost is computed again."""
    collected = []
    for how in ("die", "live"):
        command = [sys.executable, "-c", PREFIXES, form, str(tmp_path), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.stdout, done.stderr[-2000:]
        collected.append(json.loads(done.stdout.splitlines()[-1]))
    assert collected[0]["text"] == collected[1]["text"]
    assert collected[0]["cached"] == 0
    assert collected[1]["cached"] >= 64
