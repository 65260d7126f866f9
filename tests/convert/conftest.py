"""Fixtures for the tests of convert: no waits for the disk, and the command line."""

from types import SimpleNamespace

import pytest
from convert_cases import Outcome

from mlxinfer.cli import main


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power; test_convert_killed.py looks at the order of syncs."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def outcome(capsys: pytest.CaptureFixture[str]) -> Outcome:
    def call(*args: object) -> SimpleNamespace:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["convert", *map(str, args)])
        seen = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code, out=seen.out, err=seen.err)

    return call
