"""pull, list_models, convert_model: what the commands do, from Python."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "hub"))

from standin import StandIn
from standin_fixtures import cache, standin

import mlxinfer
from mlxinfer import LLM, InvalidRequestError, ModelNotFoundError

__all__ = ["cache", "standin"]


def test_a_model_is_pulled_and_listed(standin: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    folder = mlxinfer.pull("org/tiny")
    assert (folder / "model.safetensors").is_file()
    assert capsys.readouterr().err == ""  # no terminal, no bar
    models = mlxinfer.list_models()
    assert ("org/tiny", True) in [(model.name, model.complete) for model in models]
    assert "org/tiny" in models._repr_html_()
    mlxinfer.pull("org/tiny", progress=True)
    assert "download org/tiny" in capsys.readouterr().err


def test_a_model_that_is_not_there_cannot_be_pulled(standin: StandIn) -> None:
    with pytest.raises(ModelNotFoundError):
        mlxinfer.pull("org/nothing-there")


def test_progress_is_a_bool() -> None:
    for work in (
        lambda: mlxinfer.pull("demo", progress=5),  # type: ignore[arg-type]
        lambda: mlxinfer.convert_model("demo", "out", progress="no"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError, match="expected True or False"):
            work()


def test_a_model_is_converted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with LLM("demo") as demo:
        source = demo.path
    report = mlxinfer.convert(source, out, recipe="8bit", calibration=None, check=False)
    assert report.bits_per_weight > 4
    with LLM(out) as llm:
        assert llm.generate("A page", max_tokens=2).text
    with pytest.raises(InvalidRequestError, match="logits needs a text"):
        mlxinfer.convert_model(source, tmp_path / "two", calibration=None)
