"""The commands as processes of their own: the BLAS must be there before MLX is."""

import json
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli.tiny_folder import write_tiny_folder
from pooling.tiny_pooling import pooling_folder

TINY = ["--requests", "1,2", "--blocks", "1"]


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.bench", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_latency_prints_machine_and_table() -> None:
    text = bench("latency", "--small", "--long", "128", "--skip-peer")
    assert "python -m tests.bench latency --small" in text
    assert "A prompt of 128 tokens" in text
    assert "long prompt alone (s)" in text
    if sys.platform == "linux" and find_spec("scipy_openblas32"):
        assert "openblas" in text  # loaded before MLX


@pytest.mark.slow
def test_start_runs_whole_processes(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    found = json.loads(bench("start", "-m", str(folder), "--runs", "1", "--skip-peer", "--json"))
    assert [set(entry) for entry in found["processes"]] == [{"what", "mlxinfer"}] * 3
    assert found["processes"][2]["mlxinfer"]["cpu_s"] > 0


def test_wrong_numbers_are_wrong_usage() -> None:
    command = [sys.executable, "-m", "tests.bench", "host", "--requests", "1,x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "1,8,64" in done.stderr


@pytest.mark.slow
def test_host_beside_mlx_lm() -> None:
    found = json.loads(bench("host", *TINY, "--json"))
    for entry in found["decode"]:
        assert set(entry["whole"]) == {"mlxinfer", "mlx-lm"}
        assert min(side["dispatch_us"] for side in entry["without_model"].values()) > 0


@pytest.mark.slow
def test_hybrid_beside_mlx_lm() -> None:
    found = json.loads(bench("hybrid", "--small", "--runs", "1", "--cpu-time", "--json"))
    for kind in ("Gated DeltaNet", "Mamba-2", "short convolution"):
        for side in ("mlxinfer", "mlx-lm"):
            assert min(found[kind][side].values()) > 0


@pytest.mark.slow
def test_ranks_beside_mlx_lm() -> None:
    found = json.loads(bench("ranks", "--small", "--runs", "1", "--json"))
    shares = {name: max(found[name]["weights"]) for name in found if "weights" in found[name]}
    two_sums, sent = found["model"]["two_sums"], found["mlxinfer, 2, no proposals"]["bytes"]
    assert sent["rows"] == 1
    assert sent["out layers"] == found["mlx-lm, 2"]["bytes"]["out layers"] == two_sums
    assert found["mlxinfer, 2, stages"]["bytes"]["out hidden"] < two_sums
    assert shares["mlxinfer, 2"] < shares["mlx-lm, 2"], "it keeps tables on every rank"


@pytest.mark.slow
def test_latency_beside_mlx_lm() -> None:
    found = json.loads(bench("latency", "--small", "--long", "512", "--json"))
    found = found["median"]
    assert found["mlxinfer"]["short_rows"] < found["mlx-lm"]["short_rows"]


@pytest.mark.slow
def test_start_beside_mlx_lm(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    found = json.loads(bench("start", "-m", str(folder), "--runs", "1", "--json"))
    assert {"mlxinfer", "mlx-lm"} < set(found["processes"][2])


@pytest.mark.slow
def test_mlx_lm_leaves_the_limit_of_open_files_as_it_was() -> None:
    code = (
        "import resource as r\n"
        "from mlxinfer.bench.peer import peer_module\n"
        "before = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "peer_module('mlx_lm.utils')\n"
        "after = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "print(after[0] == min(before[0], after[1]), after[1] in (before[1], 4096))"
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], limits


@pytest.mark.slow
def test_embed_measures_a_model(tmp_path: Path) -> None:
    folder = pooling_folder(tmp_path / "model", "bert")
    found = json.loads(
        bench("embed", "--model", str(folder), "--texts", "9", "--runs", "2", "--json")
    )
    assert found["tokens"] > 9 * 5
    assert found["mlxinfer"]["cpu_s"] > 0
    assert "sentence-transformers" not in found
