"""Learned scales and biases: codes stay, no layer gets worse, an interrupted run goes on."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, contents, convert, write_source

from mlxinfer.convert.calibration import learn
from mlxinfer.errors import InvalidRequestError
from mlxinfer.llm import LLM

MINUTES = 0.3  # six seconds, and as many looks at the clock, for each of three layers
OPTIONS: dict[str, Any] = {"calibration": TEXT[:240], "shard_bytes": 16_000}


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted instead of timed, so that a run can be made again."""
    monkeypatch.setattr(learn, "time", Clock())
    monkeypatch.setattr(learn, "EVALUATED", 2)
    monkeypatch.setattr(learn, "PATIENCE", 1000)
    monkeypatch.setattr(learn, "RATE", 3e-3)


def arrays(folder: Path) -> dict[str, mx.array]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in mx.load(str(file)).items()}


RECURRENT = pytest.param("qwen3_5_text-v4", marks=pytest.mark.slow)


@pytest.mark.alike
@pytest.mark.parametrize("case", ["llama-v4", "qwen3_moe-v4", RECURRENT])
def test_codes_stay_and_outputs_come_closer(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[learn.LearnedLayer] = []
    monkeypatch.setattr(
        "mlxinfer.convert.run.summary", lambda layers: collected.extend(layers) or "learned"
    )
    source = write_source(tmp_path / "source", case)
    convert(source, tmp_path / "plain", "3bit-g32", **OPTIONS)
    report = convert(source, tmp_path / "out", "3bit-g32", learn_minutes=MINUTES, **OPTIONS)
    assert "learned" in report.notes
    assert any(layer.kept for layer in collected)
    assert all(
        layer.after < layer.before if layer.kept else not layer.tensors for layer in collected
    )
    plain, out = arrays(tmp_path / "plain"), arrays(tmp_path / "out")
    changed = {name for name in plain if not mx.array_equal(plain[name], out[name])}
    kept = {name for layer in collected for name in layer.tensors}
    assert {name.rpartition(".")[0] for name in changed} == {n.rpartition(".")[0] for n in kept}
    assert {name.rpartition(".")[2] for name in changed} == {"scales", "biases"}
    with LLM(str(tmp_path / "out")) as llm:
        assert np.isfinite(llm.logits([3, 4, 5])).all()


@pytest.mark.ci
def test_an_interrupted_run_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while learning, and again while scales are put into the files."""
    source = write_source(tmp_path / "source", "llama-v4")
    convert(source, tmp_path / "undisturbed", "3bit-g32", learn_minutes=MINUTES, **OPTIONS)
    for name in ("_save", "write_at"):
        count, known = 0, getattr(learn, name)

        def stopping(*given: Any, known: Any = known) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise KeyboardInterrupt
            known(*given)

        with monkeypatch.context() as patch:
            patch.setattr(learn, name, stopping)
            with pytest.raises(KeyboardInterrupt):
                convert(source, tmp_path / "out", "3bit-g32", learn_minutes=MINUTES,
                        run={"resume": True}, **OPTIONS)  # fmt: skip
    convert(
        source, tmp_path / "out", "3bit-g32", learn_minutes=MINUTES, run={"resume": True}, **OPTIONS
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_layer_that_gets_worse_stays_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "RATE", 10.0)
    source = write_source(tmp_path / "source", "llama-v4")
    convert(source, tmp_path / "plain", "4bit-g32", **OPTIONS)
    report = convert(source, tmp_path / "out", "4bit-g32", learn_minutes=MINUTES, **OPTIONS)
    assert any(note.startswith("No layer learned") for note in report.notes)
    for name, array in arrays(tmp_path / "plain").items():
        assert mx.array_equal(array, arrays(tmp_path / "out")[name]), name


def test_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has its share of the minutes, and stops with the step that exceeds it."""
    steps: list[learn.LearnedLayer] = []
    monkeypatch.setattr(
        "mlxinfer.convert.run.summary", lambda layers: steps.extend(layers) or "learned"
    )
    source = write_source(tmp_path / "source", "llama-v4")
    convert(source, tmp_path / "out", "4bit-g32", learn_minutes=MINUTES, **OPTIONS)
    assert [layer.steps for layer in steps] == [5] * 3


def test_learning_needs_a_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="Learning needs a text"):
        convert(write_source(tmp_path / "m"), tmp_path / "out", learn_minutes=1)
