"""`mlxinfer doctor --report`: small parts, parts that fail, files that cannot be written."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
from test_doctor_kernels import use_gpu

from mlxinfer import LLM
from mlxinfer.cli import _kernels, _report
from mlxinfer.cli._report import (
    LARGE,
    ON_CPU,
    SMALL,
    TINY,
    Extent,
    RandomModel,
    limits,
    page,
    run_parts,
)
from mlxinfer.engine.kernels import KERNELS_VARIABLE, choose_none, choose_on_this_machine
from mlxinfer.errors import InvalidRequestError
from mlxinfer.memory.roofline import machine
from mlxinfer.session.options import PAGES_VARIABLE


def small(monkeypatch: pytest.MonkeyPatch) -> Extent:
    """Parts of a second or less."""
    sizes = {**TINY.sizes, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
    model = RandomModel("tiny, random", (16, 40), sizes)
    extent = Extent((model,), tokens=3, steps=4, long=40, soak_s=0.2, speed_s=60)
    monkeypatch.setattr(_report, "extent_here", lambda: extent)
    return extent


@pytest.mark.ci
def test_every_part_has_its_data_and_its_table(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    monkeypatch.setattr(_kernels, "this_gpu", lambda: None)
    path = tmp_path / "out.json"
    seen = outcome("doctor", "--report", str(path))
    assert seen.code == 0, seen.err
    assert "[5/6] speed of tiny, random: ok" in seen.err
    report = json.loads(path.read_text())
    assert (report["ok"], report["running"]) == (True, None)
    assert list(report["parts"]) == [
        "machine", "kernels", "tokens", "tokens, long", "speed of tiny, random", "soak",
    ]  # fmt: skip
    data = {name.partition(" of ")[0]: entry["data"] for name, entry in report["parts"].items()}
    assert "no Metal here" in data["kernels"]["about"]
    assert data["tokens"]["differences"] == data["tokens, long"]["differences"] == []
    assert data["tokens, long"]["prompts"] == [40, 40]
    assert set(data["tokens, long"]["seconds"]) == {"kernels", "kernels, pages of 32", "plain MLX"}
    cells = data["speed"]["cells"]
    sizes = [(16, 1), (40, 1), (16, 8), (40, 8)]
    assert [(cell["context"], cell["batch"]) for cell in cells] == sizes
    assert all(cell["counters"]["steps"] >= 3 for cell in cells)
    assert all(cell["generation_tokens_per_s"] > 0 for cell in cells)
    assert data["soak"]["samples"][-1]["peak_bytes"] > 0
    text = path.with_suffix(".md").read_text()
    lists = ("machine: checks", "kernels: kernels", "speed of tiny, random: cells", "soak: samples")
    for title in ("Parts", *lists):
        assert f"**{title}**" in text
    assert "**tokens: differences**\n\n| none |" in text
    assert "no Metal here" in text
    assert sorted(os.listdir(tmp_path)) == ["out.json", "out.md"]


def test_a_part_that_fails_is_an_entry_and_the_others_go_on(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    use_gpu(monkeypatch, tmp_path / "cache", fake_gpu.does_not_compile)

    def broken(steps: int) -> dict[str, Any]:
        raise RuntimeError("[metal] the GPU <hangs>")

    monkeypatch.setattr(_report, "tokens_part", broken)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "out.json"
    assert outcome("doctor", "--report", str(path), "-m", "demo-draft").code == 1
    text = path.read_text()
    parts = json.loads(text)["parts"]
    by_name = {name: entry["status"] for name, entry in parts.items()}
    fine = dict.fromkeys(("machine", "tokens, long", "speed of demo-draft", "soak"), "ok")
    assert by_name == {**fine, "kernels": "fail", "tokens": "error"}
    assert "in broken" in parts["tokens"]["traceback"]
    rows = parts["kernels"]["data"]["kernels"]
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert all(row["first_run_s"] > 0 for row in rows)
    assert str(tmp_path) not in text
    markdown = path.with_suffix(".md").read_text()
    assert " | RuntimeError: [metal] the GPU &lt;hangs> |" in markdown
    assert "Unable to build metal library" in markdown


def test_an_interrupt_leaves_what_was_found(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(steps: int) -> dict[str, Any]:
        raise KeyboardInterrupt

    small(monkeypatch)
    monkeypatch.setattr(_report, "tokens_part", interrupted)
    path = tmp_path / "out.json"
    assert outcome("doctor", "--report", str(path)).code == 130
    report = json.loads(path.read_text())
    assert (report["running"], list(report["parts"])) == ("tokens", ["machine", "kernels"])
    assert not report["ok"]
    assert "ended while this part was running: tokens." in path.with_suffix(".md").read_text()


def test_files_and_models_that_are_wrong_are_named_at_once(outcome: Any, tmp_path: Path) -> None:
    for name in ("out.txt", "nowhere/out.json"):
        seen = outcome("doctor", "--report", str(tmp_path / name))
        assert seen.code == 1
        assert name in seen.err
    seen = outcome("doctor", "--report", str(tmp_path / "out.json"), "-m", "./nowhere")
    assert (seen.code, "nowhere" in seen.err) == (1, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    seen = outcome("doctor", "--report", str(tmp_path / "out.json"), "-m", str(empty))
    assert (seen.code, "config.json" in seen.err) == (1, True)
    empty.rmdir()
    assert "goes with --report" in outcome("doctor", "-m", "demo").err
    assert "has --kernels" in outcome("doctor", "--kernels", "--report", "out.json").err
    assert not list(tmp_path.iterdir())


def test_late_measurements_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extent = replace(small(monkeypatch), speed_s=-1)
    parts = _report.all_parts(extent, dict, None, tmp_path)
    report = run_parts(tmp_path / "out.json", {"speed of it": parts["speed of tiny, random"]})
    cells = report["parts"]["speed of it"]["data"]["cells"]
    assert {cell["left_out"] for cell in cells} == {"the time was up"}
    assert "| 16 | 1 | the time was up |" in page(report)


def test_limits_are_those_of_this_chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [model] = small(monkeypatch).models
    summary = _report.summarise(_report.random_checkpoint(tmp_path / "model", model))
    monkeypatch.setattr(_report, "this_mac", lambda: None)
    assert "unknown" in limits(summary, 16, 1)
    monkeypatch.setattr(_report, "this_mac", lambda: machine("M4 Max 64GB"))
    one, eight = (limits(summary, 16, batch) for batch in (1, 8))
    assert one["machine"] == "M4 Max 64 GB"
    low, high = one["generation_tokens_per_s"]
    assert low < high < eight["generation_tokens_per_s"][1] < 8 * high


def test_the_first_difference_is_told_with_its_probabilities() -> None:
    with LLM("demo", speculate="off") as llm:
        plain = list(llm.generate("Once upon a time", max_tokens=6, ignore_eos=True).token_ids)
        other = [*plain[:3], plain[3] + 1, *plain[4:]]
        prompt = llm.tokenizer.encode("Once upon a time")
        difference = _report._first_difference(llm, prompt, other, plain)
    assert (difference["step"], difference["tokens"]) == (3, [plain[3] + 1, plain[3]])
    assert difference["most_probable"][0][0] == plain[3]


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu.gpu()[0]
    monkeypatch.setattr("mlxinfer.engine.kernels.this_gpu", lambda: gpu)
    assert choose_on_this_machine() is not choose_none
    with _report.plain_mlx():
        assert choose_on_this_machine() is choose_none
    assert KERNELS_VARIABLE not in os.environ


def test_pages_have_as_many_tokens_as_the_environment_says() -> None:
    with _report.variable(PAGES_VARIABLE, "32"), LLM("demo") as llm:
        assert llm.stats()["page_size"] == 32
    refused = pytest.raises(InvalidRequestError, match="16 or 32")
    with _report.variable(PAGES_VARIABLE, "24"), refused:
        LLM("demo")
    assert PAGES_VARIABLE not in os.environ


def test_a_gpu_is_given_the_shapes_of_real_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report.mx.metal, "is_available", lambda: False)
    assert _report.extent_here() == ON_CPU
    monkeypatch.setattr(_report.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(_report, "total_memory_bytes", lambda: 8 << 30)
    assert _report.extent_here().models == (SMALL,)
    monkeypatch.setattr(_report, "total_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(_report, "LARGE_DISK", 0)
    assert _report.extent_here().models == (SMALL, LARGE)
