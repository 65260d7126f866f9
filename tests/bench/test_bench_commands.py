"""The commands as processes of their own: the BLAS must be there before MLX is."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pooling.tiny_pooling import pooling_folder

ALONE = {  # claims that mlxinfer is measured for alone, as small as they are
    "dispatches": "--skip-peer",
    "elsewhere": "",
    "experts": "--small --runs 1",
    "host": "--requests 1,2 --blocks 1 --skip-peer",
    "hybrid": "--small --pairs 1 --skip-peer",
    "kv": "--small --skip-peer",
    "latency": "--small --long 128 --cpu-time --prefill-chunk 64 --skip-peer",
    "load": "--size 20MB --runs 1 --skip-peer",
    "memory": "--small --skip-peer",
    "prefix": "--small --skip-peer",
    "rates": "--small --pairs 1 --skip-peer",
    "serve": "--small --skip-peer",
    "soak": "--minutes 0.1 --clients 3",
    "speculate": "--small",
    "start": "--runs 1 --skip-peer",
}
LONGEST = ("speculate", "memory", "load", "soak")


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.bench", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(*arguments: str) -> Any:
    return json.loads(bench(*arguments, "--json"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONGEST else pytest.mark.ci)
        for name in ALONE
    ],
)
def test_each_claim_prints_the_machine_and_tables(name: str) -> None:
    if name == "serve" and sys.platform != "linux":
        pytest.skip("reads /proc")
    text = bench(name, *ALONE[name].split(), "--markdown")
    assert f"python -m tests.bench {name}" in text
    titles = [line for line in text.splitlines() if line.startswith("**")]
    rules = [line for line in text.splitlines() if line.startswith("| :--")]
    assert len(titles) == len(rules) >= 1
    if name == "latency" and sys.platform == "linux" and find_spec("scipy_openblas32"):
        assert "openblas" in text  # loaded before MLX


def test_wrong_numbers_are_wrong_usage() -> None:
    command = [sys.executable, "-m", "tests.bench", "host", "--requests", "1,x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "1,8,64" in done.stderr


@pytest.mark.ci
def test_embed_measures_a_model(tmp_path: Path) -> None:
    folder = pooling_folder(tmp_path / "model", "bert")
    found = measured("embed", "--model", str(folder), "--texts", "9", "--runs", "2")
    assert found["tokens"] > 9 * 5
    assert found["mlxinfer"]["cpu_s"] > 0
    assert "sentence-transformers" not in found


@pytest.mark.ci
def test_quality_of_the_demo_model() -> None:
    found = measured("kv", "--small", "--skip-peer")["quality"]["formats"]
    plain, eight, mixed, four, _ = found.values()
    assert (plain["kl_mean"], plain["top1"]) == (0.0, 1.0)
    assert 0 < eight["kl_mean"] < 1e-4
    assert eight["kl_mean"] < mixed["kl_mean"] < four["kl_mean"] < 0.02
    sizes = [each["bytes_per_token"] for each in found.values()]
    assert sizes == [4096, 1088, 832, 576, (4096 + 576) / 2]
    assert eight["of_bfloat16"] == pytest.approx(0.53125)


# -- beside mlx-lm ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "hybrid", "kv", "start"])
def test_times_beside_mlx_lm(name: str) -> None:
    text = bench(name, *ALONE[name].replace("--skip-peer", "").split(), "--markdown")
    assert "mlx-lm | ratio |" in text
    assert "x |" in text


@pytest.mark.slow
def test_ranks_beside_mlx_lm() -> None:
    found = measured("ranks", "--small", "--runs", "1")
    shares = {name: max(found[name]["weights"]) for name in found if "weights" in found[name]}
    two_sums, sent = found["model"]["two_sums"], found["mlxinfer, 2, no proposals"]["bytes"]
    assert sent["rows"] == 1
    assert sent["out layers"] == found["mlx-lm, 2"]["bytes"]["out layers"] == two_sums
    assert found["mlxinfer, 2, stages"]["bytes"]["out hidden"] < two_sums
    assert shares["mlxinfer, 2"] < shares["mlx-lm, 2"], "it keeps tables on every rank"


@pytest.mark.slow
def test_latency_beside_mlx_lm() -> None:
    found = measured("latency", "--small", "--long", "512")["median"]
    assert found["mlxinfer"]["short_rows"] < found["mlx-lm"]["short_rows"]


@pytest.mark.slow
def test_memory_beside_mlx_lm() -> None:
    found = measured("memory", "--small")
    held, moved = found["held"], found["join_and_leave"]
    assert held["mlxinfer"]["held_bytes"] < held["mlx-lm"]["held_bytes"]
    assert moved["mlxinfer"]["join_bytes"] < moved["mlx-lm"]["join_bytes"]


@pytest.mark.slow
def test_prefix_beside_mlx_lm() -> None:
    scenes = measured("prefix", "--small")["scenes"]
    found = {scene["scene"]: (scene["mlxinfer"], scene["mlx-lm"]) for scene in scenes}
    for ours, theirs in found.values():
        assert ours["prompt_tokens"] == theirs["prompt_tokens"]
    ours, theirs = found["more questions, same document, window 64"]
    assert theirs["computed"] == theirs["prompt_tokens"]
    assert ours["computed"] < 0.15 * ours["prompt_tokens"]
    ours, theirs = found["last message edited"]
    assert ours["computed"] == theirs["computed"]


@pytest.mark.ci
def test_mlx_lm_leaves_the_limit_of_open_files_as_it_was() -> None:
    code = (
        "import resource as r\n"
        "from mlxinfer.bench.peer import peer_module\n"
        "before = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "peer_module('mlx_lm.utils')\n"
        "after = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "print(after[0] == min(before[0], after[1]), after[1] in (before[1], 4096))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
