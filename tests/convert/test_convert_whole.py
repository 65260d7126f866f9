"""Models whose layers cannot run alone: they convert without a text, and say so."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from models.tiny import tiny_checkpoint
from pooling.tiny_pooling import write_tokenizer

from mlxinfer import LLM, convert_model
from mlxinfer.cli._commands import cli
from mlxinfer.errors import InvalidRequestError

WHOLE = {
    "inkling2_loop_text-v5": "sums of earlier blocks",
    "deepseek_v4-v4": "compressed vectors",
    "gemma3n_text-v4": "inputs and keys",
}


@pytest.fixture(params=WHOLE)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path / request.param, request.param)
    write_tokenizer(folder, 96)
    return folder


@pytest.mark.alike
def test_they_convert_by_default(source: Path, tmp_path: Path) -> None:
    report = convert_model(source, tmp_path / "out", recipe="8bit")
    assert report.passed
    assert any(WHOLE[source.name] in note for note in report.notes)
    with LLM(tmp_path / "out") as llm:
        assert llm.generate([[5, 9, 7]], max_tokens=2)[0].token_ids


@pytest.mark.parametrize("options", [["--check", "full"], ["--target-bpw", "5"]])
def test_what_needs_layers_alone_is_refused_at_once(tmp_path: Path, options: list[str]) -> None:
    folder = tiny_checkpoint(tmp_path / "source", "inkling2_loop_text-v5")
    write_tokenizer(folder, 96)
    result = CliRunner().invoke(cli, ["convert", str(folder), str(tmp_path / "out"), *options])
    assert isinstance(result.exception, InvalidRequestError)
    assert "its core runs several times" in str(result.exception)
    assert list(tmp_path.iterdir()) == [folder]
