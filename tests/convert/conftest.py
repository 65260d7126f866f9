"""Conversions draw no figures unless a test is about them: they cost a second each."""

import pytest


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.convert.report.available", lambda: False)
