"""A kernel of another rank that writes NaN is named on every rank, and no request sees it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from metal_cpu import requires_compiler
from models.cases import CASES
from models.tiny import tiny_checkpoint

from mlxinfer.metal_kernels.selfcheck import FAULTY, Verdicts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.alike
@pytest.mark.ci
@requires_compiler
@pytest.mark.parametrize("pipeline", [False, True], ids=["parts", "stages"])
def test_nan_of_another_rank_names_the_kernel_everywhere(
    pipeline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"head_dim": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    monkeypatch.setitem(CASES, "wide", {**CASES["qwen3-v4"], **sizes})
    folder = tiny_checkpoint(tmp_path / "model", "wide", quantize={"group_size": 32, "bits": 8})
    settings = {
        "folder": str(folder), "file": "gate_up", "since": 9, "pipeline": pipeline,
        "verdicts": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ranks.poisoned_rank", json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(done.stdout.splitlines()[-1])
    assert content["errors"] == []
    assert content["tokens"] == content["plain"]
    assert content["left_out"] == ["gate_up"]
    for rank in "01":
        known = Verdicts(tmp_path / rank, "a GPU").read()
        assert {(key.split()[0], verdict.status) for key, verdict in known.items()} == {
            ("gate_up", FAULTY)
        }
