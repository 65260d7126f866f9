"""`mlxinfer bench`: rates follow from the times of tokens, and reports can be compared."""

import json
import re
from pathlib import Path

import pytest
from bench.bench_parts import check
from click.testing import CliRunner
from models.tiny import config_of

from benchmarks.checkpoints import TWO_LAYERS, write_checkpoint
from mlxinfer import LLM
from mlxinfer.bench import speed
from mlxinfer.bench.peer import PeerGeneration
from mlxinfer.bench.report import Report, show
from mlxinfer.cli._commands import cli
from mlxinfer.errors import InvalidRequestError, UnsupportedModelError
from mlxinfer.speculation.ngram import NgramProposer


@pytest.mark.parametrize(
    ("times", "rate"),
    [
        ([[1.0, 1.5, 2.0]], 2.0),
        ([[1.0, 3.0, 5.0], [2.0, 3.0, 4.0]], 4 / 3),  # the token at 1.0 is before the window
    ],
)
def test_generation_counts_from_the_last_first_token(times: list[list[float]], rate: float) -> None:
    assert speed.generation_rate(times) == pytest.approx(rate)


def test_a_cell_is_made_of_medians_over_runs() -> None:
    asked = []

    def token_times(prompts: list[list[int]], enough: int) -> list[list[float]]:
        asked.append(prompts)
        first = float(len(asked))  # 1, 2, 3 seconds
        return [[first + i for i in range(enough)] for _ in prompts]

    with LLM("demo-draft") as llm:
        cell = speed.measure(token_times, llm.tokenizer, 12, 2, tokens=5, runs=3)
    assert cell.prompt_tokens_per_s == pytest.approx(2 * 12 / 2.0)
    assert (cell.first_token_s, cell.generation_tokens_per_s) == (2.0, 2.0)
    prompts = [ids for question in asked for ids in question]
    assert {len(ids) for ids in prompts} == {12}
    assert len({tuple(ids[:8]) for ids in prompts}) == 6, "a shared prefix would be reused"


@pytest.mark.ci
def test_a_report_has_a_row_for_each_size_and_compares_with_a_saved_one(tmp_path: Path) -> None:
    arguments = ["bench", "--contexts", "24,8", "--batches", "1,3", "--tokens", "4", "--skip-peer"]
    first = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    saved = tmp_path / "saved.json"
    saved.write_text(first.stdout)
    cells = json.loads(first.stdout)["cells"]
    assert set(cells) == {"mlxinfer"}
    sizes = [(cell["context"], cell["batch"]) for cell in cells["mlxinfer"]]
    assert sizes == [(8, 1), (24, 1), (8, 3), (24, 3)]
    assert all(min(cell.values()) > 0 for cell in cells["mlxinfer"])

    report = speed.run(
        lambda: LLM("demo-draft"),
        contexts=[8],
        tokens=4,
        peer=False,
        before=speed.read_saved(saved),
    )
    check(report)
    [rates, beside] = report.tables
    assert [row[0] for row in rates.rows] == ["8 x 1", "8 x 4"]
    assert [row[0] for row in beside.rows] == ["8 x 1"], "what both have"


@pytest.mark.slow
def test_a_report_beside_mlx_lm() -> None:
    report = speed.run(lambda: LLM("demo-draft"), contexts=[16], batches=[1, 2], tokens=4)
    check(report)
    assert [table.title for table in report.tables][1].startswith("Beside mlx-lm")
    assert set(report.data["cells"]) == {speed.OURS, speed.PEER}


@pytest.mark.ci
def test_what_mlx_lm_cannot_load_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "model", TWO_LAYERS)
    config_of(folder, model_type="unheard_of")
    with pytest.raises(UnsupportedModelError, match=r"mlx-lm does not load .*unheard_of"):
        PeerGeneration(folder)

    def refused(folder: Path) -> None:
        raise UnsupportedModelError("mlx-lm does not load it")

    monkeypatch.setattr(speed, "PeerGeneration", refused)
    report = speed.run(lambda: LLM("demo-draft"), contexts=[8], tokens=2)
    assert [table.note.endswith("mlx-lm does not load it") for table in report.tables] == [True]
    assert report.data["not_compared"] == "mlx-lm does not load it"
    assert set(report.data["cells"]) == {speed.OURS}


def test_a_report_says_which_proposals_failed_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("an odd table")

    monkeypatch.setattr(NgramProposer, "outlook", fail)
    report = speed.run(
        lambda: LLM("demo-draft"), contexts=[8], batches=[1], tokens=4, runs=1, peer=False
    )
    said = r"Proposals by ngram failed for \d requests: ValueError: an odd table\."
    assert re.search(said, report.tables[0].note)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"the model takes [\d,]+\."):
        speed.run(lambda: LLM("demo-draft"), contexts=[1 << 20], peer=False)
    with pytest.raises(InvalidRequestError, match="at least 2"):
        speed.run(lambda: LLM("demo-draft"), tokens=1, peer=False)
    (tmp_path / "other.json").write_text('{"cells": {"mlxinfer": [{"context": 1}]}}')
    with pytest.raises(InvalidRequestError, match="no report of `mlxinfer bench`"):
        speed.read_saved(tmp_path / "other.json")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        speed.read_saved(tmp_path / "missing.json")


def test_requests_that_the_kv_cache_does_not_hold_together_are_left_out() -> None:
    report = speed.run(
        lambda: LLM("demo-draft", num_pages=100),
        contexts=[8, 1000],
        batches=[1, 2],
        tokens=2,
        peer=False,
    )
    assert [row[0] for row in report.tables[0].rows] == ["8 x 1", "8 x 2", "1,000 x 1"]
    assert report.data["left_out"] == "The KV cache has no room for 1,000 x 2."
    assert report.data["left_out"] in report.tables[0].note


def test_by_default_contexts_are_those_that_the_model_takes() -> None:
    assert speed._fitting(32_768, None, 128) == [512, 2048, 8192]
    assert speed._fitting(1000, None, 128) == [512]
    assert speed._fitting(1000, None, 600) == [400]


def test_tables_name_their_columns_at_80(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cells = [speed.SpeedCell(131_072, 16, 123_456.0, 12_345.6, 12.345, 123_456_789_000)]
    tables = speed._tables({speed.OURS: cells, speed.PEER: cells}, 128, None, "")
    show(Report("speed", tables, {}))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert words.count("131,072") == len(tables)
    assert {"requests", "tokens/s", "mlx-lm", "memory", "123,456"} <= {*words}
    assert "…" not in "".join(lines)
