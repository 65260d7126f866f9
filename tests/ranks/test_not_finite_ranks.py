"""A kernel of another rank that writes NaN is named on every rank, and no request sees it."""

import json
from pathlib import Path

import pytest
from metal_cpu import requires_compiler
from models.tiny import tiny_checkpoint

from benchmarks.processes import ROOT, run_python
from mlxinfer.metal_kernels.selfcheck import FAULTY, Verdicts


@pytest.mark.alike
@pytest.mark.ci
@requires_compiler
@pytest.mark.parametrize("pipeline", [False, True], ids=["parts", "stages"])
def test_nan_of_another_rank_names_the_kernel_everywhere(pipeline: bool, tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    how = {"group_size": 32, "bits": 8}
    folder = tiny_checkpoint(tmp_path / "model", "qwen3-v4", quantize=how, **sizes)
    settings = {
        "folder": str(folder), "file": "gate_up", "since": 9, "pipeline": pipeline,
        "verdicts": str(tmp_path),
    }  # fmt: skip
    command = ("-m", "ranks.poisoned_rank", json.dumps(settings))
    content = json.loads(run_python(*command, PYTHONPATH=f"{ROOT / 'tests'}:{ROOT}").lines[-1])
    assert content["errors"] == []
    assert content["tokens"] == content["plain"]
    assert content["left_out"] == ["gate_up"]
    for rank in "01":
        known = Verdicts(tmp_path / rank, "a GPU").read()
        assert {(key.split()[0], verdict.status) for key, verdict in known.items()} == {
            ("gate_up", FAULTY)
        }
