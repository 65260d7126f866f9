"""`bench convert`: sizes counted from files; (slow) the claims it is there for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from convert_cases import convert, write_source

from benchmarks.convert import bits_per_weight


def bench(*options: str) -> dict:
    command = [sys.executable, "-m", "benchmarks", "convert", *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("recipe", ["4bit", "6bit-g32", "mxfp4", "bf16"])
def test_sizes_are_counted_as_the_report_counts(tmp_path: Path, recipe: str) -> None:
    report = convert(write_source(tmp_path / "source", "qwen3_moe-v4"), tmp_path / "out", recipe)
    assert bits_per_weight(tmp_path / "out") == pytest.approx(report.bits_per_weight)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "convert", "--skip-peer"]
    done = subprocess.run(
        [*command, "--model", str(tmp_path)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 1
    assert f"{tmp_path} has no model" in done.stderr


@pytest.mark.slow
def test_a_target_of_four_and_a_half_bits_beats_uniform_four(tmp_path: Path) -> None:
    by_name = {(r["converter"], r["label"]): r for r in bench("--small")["recipes"]}
    ours = by_name["mlxinfer", "--target-bpw 4.5"]
    theirs = by_name["mlx-lm", "4 bits, group 64"]
    assert ours["bits_per_weight"] <= theirs["bits_per_weight"]
    assert ours["kl_mean"] < 0.7 * theirs["kl_mean"]
    searched, minmax = by_name["mlxinfer", "4bit"], by_name["mlxinfer", "4bit --fast"]
    assert searched["kl_mean"] < minmax["kl_mean"]


@pytest.mark.slow
def test_large_checkpoints_take_little_memory() -> None:
    costs = bench("--synthetic", "300MB")["conversions"]
    assert [item["label"] for item in costs] == ["dense", "mixture of experts"]
    for item in costs:
        assert item["fast"]["peak_bytes"] <= 0.4 * item["theirs"]["peak_bytes"]
        assert item["searched"]["peak_bytes"] <= 0.4 * item["theirs"]["peak_bytes"]
