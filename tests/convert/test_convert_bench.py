"""`bench real`: sizes counted from files; (slow) conversions beside mlx-lm's."""

import json
from pathlib import Path

import pytest
from convert_cases import convert, write_source

from benchmarks.conversions import bits_per_weight
from benchmarks.processes import run_python


@pytest.mark.parametrize("recipe", ["4bit", "6bit-g32", "mxfp4", "bf16"])
def test_sizes_are_counted_as_the_report_counts(tmp_path: Path, recipe: str) -> None:
    report = convert(write_source(tmp_path / "source", "qwen3_moe-v4"), tmp_path / "out", recipe)
    assert bits_per_weight(tmp_path / "out") == pytest.approx(report.bits_per_weight)


@pytest.mark.slow
def test_a_target_of_four_and_a_half_bits_beats_uniform_four() -> None:
    model = ["--parts", "conversion", "--model", "tests/data/demo-bf16"]
    lines = run_python("-m", "benchmarks", "real", *model, "--json").lines
    by_name = {one["label"]: one for one in json.loads("".join(lines))["conversion"]}
    ours, theirs = by_name["mlxinfer --target-bpw 4.5"], by_name["mlx-lm 4 bits"]
    assert ours["bits"] <= theirs["bits"]
    assert ours["kl_mean"] < 0.7 * theirs["kl_mean"]
    assert by_name["mlxinfer 4bit"]["kl_mean"] < by_name["mlxinfer --fast"]["kl_mean"]
