"""What the tests of convert share: no figures, which cost a second each, and the command line."""

from types import SimpleNamespace

import pytest
from convert_cases import Outcome

from mlxinfer.cli import main


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.convert.report.available", lambda: False)


@pytest.fixture
def outcome(capsys: pytest.CaptureFixture[str]) -> Outcome:
    def call(*args: object) -> SimpleNamespace:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["convert", *map(str, args)])
        seen = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code, out=seen.out, err=seen.err)

    return call
