"""Spans of OpenTelemetry: the environment decides, and nothing is imported without it."""

import logging
import sys

import pytest

from mlxinfer.server.http import Receive, Scope, Send
from mlxinfer.server.run import traced


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers nothing."""


def test_without_a_collector_the_app_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert traced(app) is app


def test_a_missing_extra_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.asgi", None)
    with caplog.at_level(logging.WARNING):
        assert traced(app) is app
    assert "mlxinfer[otel]" in caplog.text


def test_with_a_collector_the_app_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert exporter
    assert type(traced(app)).__name__ == "OpenTelemetryMiddleware"
