"""Lines of the log, and traces."""

import json
import logging
import sys
import time
from collections.abc import Iterator

import pytest
from live_server import CHAT, LiveServer, access_log, chat

from mlxinfer.server.http import Receive, Scope, Send
from mlxinfer.server.log import json_line, text_line
from mlxinfer.server.run import traced
from tests.waiting import wait_until

SECRET = "swordfish"


@pytest.fixture
def lines(server: LiveServer) -> Iterator[list[logging.LogRecord]]:
    """Records of the access log."""
    with access_log() as lines:
        server.get("/first")
        wait_until(lambda: any("/first" in text_line(record) for record in lines))
        lines.clear()  # with it came the lines of requests before the test
        yield lines


def test_requests_are_lines_without_text(
    server: LiveServer, lines: list[logging.LogRecord]
) -> None:
    server.events(CHAT, chat(SECRET, max_tokens=3))
    wait_until(lambda: lines)  # a line is written after its answer
    server.post(CHAT, chat(SECRET, n=0), headers={"x-request-id": "abc"})
    wait_until(lambda: len(lines) == 2)
    good, bad = (json.loads(json_line(record)) for record in lines)
    assert (good["status"], good["stream"], good["answer_tokens"]) == (200, True, 3)
    assert (bad["status"], bad["request_id"]) == (400, "abc")
    assert (bad["error"], bad["param"]) == ("InvalidRequestError", "n")
    assert good["duration_ms"] > 0
    date = time.strftime("%Y-%m-%d ", time.localtime(lines[0].created))
    assert text_line(lines[0]).startswith(date)
    assert " info POST /v1/chat/completions 200 " in text_line(lines[0])
    assert text_line(lines[1]).endswith(" request_id=abc")
    for record in lines:
        for text in (json_line(record), text_line(record)):
            assert SECRET not in text
            assert "\n" not in text


def test_a_path_cannot_forge_a_line(server: LiveServer, lines: list[logging.LogRecord]) -> None:
    server.get("/x%0a12:00:00%20info%20request%20status=200")
    wait_until(lambda: lines)
    assert "\n" not in text_line(lines[0])


def test_a_failure_has_a_traceback_and_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"msg": "failed", "request_id": "r1"})
    try:
        raise ValueError("inside")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(json_line(record))
    assert line["request_id"] == "r1"
    assert "ValueError: inside" in line["traceback"]
    assert "ValueError: inside" in text_line(record)


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
    assert ".[otel]" in caplog.text


def test_with_a_collector_the_app_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert exporter
    assert type(traced(app)).__name__ == "OpenTelemetryMiddleware"
