"""The commands as processes of their own: the BLAS must be there before MLX is."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pooling.tiny_pooling import pooling_folder

from benchmarks.processes import run_python
from benchmarks.real import q4_0, q8_0

ALONE = {  # claims that mlxinfer is measured for alone, as small as they are
    "dispatches": "--skip-peer",
    "experts": "--small --runs 1",
    "fair": "--answers 1 --skip-same",
    "host": "--requests 1,2 --blocks 1 --skip-peer",
    "gpu": "--small --pairs 1 --skip-peer",
    "hybrid": "--small --pairs 1 --skip-peer",
    "lookup": "--tokens 320 --runs 1",
    "latency": "--small --long 128 --cpu-time --prefill-chunk 64 --skip-peer",
    "load": "--size 20MB --runs 1 --skip-peer",
    "memory": "--small --skip-peer",
    "prefix": "--small --skip-peer",
    "rates": "--small --pairs 1 --skip-peer",
    "real": "--small --model tests/data/demo-bf16 --skip-peer",
    "soak": "--minutes 0.1 --clients 3",
    "speculate": "--small",
}
LONGEST = ("speculate", "memory", "load", "soak", "fair", "gpu")


def bench(*arguments: str) -> str:
    return "\n".join(run_python("-m", "benchmarks", *arguments, COLUMNS="120").lines)


def measured(*arguments: str) -> Any:
    return json.loads(bench(*arguments, "--json"))


@pytest.mark.alike
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONGEST else pytest.mark.ci)
        for name in ALONE
    ],
)
def test_each_claim_prints_the_machine_and_tables(name: str) -> None:
    text = bench(name, *ALONE[name].split(), "--markdown")
    assert f"python -m benchmarks {name}" in text
    titles = [line for line in text.splitlines() if line.startswith("**")]
    rules = [line for line in text.splitlines() if line.startswith("| :--")]
    assert len(titles) == len(rules) >= 1
    if name == "latency" and sys.platform == "linux" and find_spec("scipy_openblas32"):
        assert "openblas" in text  # loaded before MLX


def test_wrong_numbers_are_wrong_usage() -> None:
    command = [sys.executable, "-m", "benchmarks", "host", "--requests", "1,x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "1,8,64" in done.stderr


@pytest.mark.ci
def test_embed_measures_a_model(tmp_path: Path) -> None:
    folder = pooling_folder(tmp_path / "model", "bert")
    report = measured("embed", "--model", str(folder), "--texts", "9", "--runs", "2")
    assert report["tokens"] > 9 * 5
    assert report["mlxinfer"]["cpu_s"] > 0
    assert "sentence-transformers" not in report


@pytest.mark.ci
def test_quality_of_the_demo_model() -> None:
    demo = ["--model", "tests/data/demo-bf16", "--converted", "tests/data/demo-bf16"]
    report = measured("real", "--small", "--skip-peer", *demo)
    plain, eight, mixed, four, *_ = report["cache"]
    assert (plain["kl_mean"], plain["top1"]) == (0.0, 1.0)
    assert 0 < eight["kl_mean"] < 5e-4
    assert eight["kl_mean"] < mixed["kl_mean"] < four["kl_mean"] < 0.1
    sizes = [one["bits"] for one in report["cache"]]
    assert sizes == [32, 8.5, 6.5, 4.5, 32]
    (same,) = report["conversion"]
    assert (same["kl_mean"], same["top1"]) == (0.0, 1.0)
    assert same["bits"] == pytest.approx(16, abs=0.1)


def test_codes_of_others_are_as_they_say() -> None:
    """Within half a step; a group's largest number is exact, but for the scale's rounding."""
    vectors = mx.random.normal((5, 64), key=mx.random.key(0))
    grouped = mx.abs(mx.unflatten(vectors, -1, (-1, 32))).max(axis=-1, keepdims=True)
    largest = mx.broadcast_to(grouped, (5, 2, 32)).flatten(-2)
    for rounded, steps in ((q8_0, 127), (q4_0, 8)):
        off = mx.abs(rounded(vectors) - vectors)
        assert (off <= largest * (0.57 if rounded is q8_0 else 1.01) / steps).all().item()
        assert len(set(mx.unflatten(rounded(vectors), -1, (-1, 32))[0, 0].tolist())) <= 2 * steps
    assert mx.array_equal(q4_0(mx.zeros((2, 32))), mx.zeros((2, 32))).item()


# -- beside mlx-lm ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "hybrid"])
def test_times_beside_mlx_lm(name: str) -> None:
    text = bench(name, *ALONE[name].replace("--skip-peer", "").split(), "--markdown")
    assert "mlx-lm | ratio |" in text
    assert "x |" in text


@pytest.mark.slow
def test_ranks_beside_mlx_lm() -> None:
    report = measured("ranks", "--small", "--runs", "1")
    shares = {name: max(report[name]["weights"]) for name in report if "weights" in report[name]}
    two_sums, sent = report["model"]["two_sums"], report["mlxinfer, 2, no proposals"]["bytes"]
    assert sent["rows"] == 1
    assert sent["out layers"] == report["mlx-lm, 2"]["bytes"]["out layers"] == two_sums
    assert report["mlxinfer, 2, stages"]["bytes"]["out hidden"] < two_sums
    assert shares["mlxinfer, 2"] < shares["mlx-lm, 2"], "it keeps tables on every rank"


@pytest.mark.slow
def test_latency_beside_mlx_lm() -> None:
    result = measured("latency", "--small", "--long", "512")["median"]
    assert result["mlxinfer"]["short_rows"] < result["mlx-lm"]["short_rows"]


@pytest.mark.slow
def test_memory_beside_mlx_lm() -> None:
    report = measured("memory", "--small")
    held, moved = report["held"], report["join_and_leave"]
    assert held["mlxinfer"]["held_bytes"] < held["mlx-lm"]["held_bytes"]
    assert moved["mlxinfer"]["join_bytes"] < moved["mlx-lm"]["join_bytes"]


@pytest.mark.slow
def test_prefix_beside_mlx_lm() -> None:
    scenes = measured("prefix", "--small")["scenes"]
    by_name = {scene["scene"]: (scene["mlxinfer"], scene["mlx-lm"]) for scene in scenes}
    for ours, theirs in by_name.values():
        assert ours["prompt_tokens"] == theirs["prompt_tokens"]
    ours, theirs = by_name["more questions, same document, window 64"]
    assert theirs["computed"] == theirs["prompt_tokens"]
    assert ours["computed"] < 0.15 * ours["prompt_tokens"]
    ours, theirs = by_name["last message edited"]
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
    assert run_python("-c", code).lines == ["True True"]
