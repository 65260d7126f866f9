"""What the server writes about itself."""

import json
import logging
from collections.abc import Iterator

import pytest
from live_server import CHAT, LiveServer, chat, wait_until

from mlxinfer.server.log import JsonLines, TextLines, set_up_logging

SECRET = "swordfish"


@pytest.fixture
def lines(server: LiveServer) -> Iterator[list[logging.LogRecord]]:
    """Records of the access log."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[assignment, method-assign]
    logger = logging.getLogger("mlxinfer.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    server.get("/first")
    wait_until(lambda: any("/first" in TextLines().format(record) for record in found))
    found.clear()  # with it came the lines of requests before the test
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_request_is_a_line_without_its_text(
    server: LiveServer, lines: list[logging.LogRecord]
) -> None:
    server.events(CHAT, chat(SECRET, max_tokens=3))
    wait_until(lambda: lines)  # a line is written after its answer
    server.post(CHAT, chat(SECRET, n=0), headers={"x-request-id": "abc"})
    wait_until(lambda: len(lines) == 2)
    good, bad = (json.loads(JsonLines().format(record)) for record in lines)
    assert (good["status"], good["stream"], good["answer_tokens"]) == (200, True, 3)
    assert (bad["status"], bad["request_id"]) == (400, "abc")
    assert (bad["error"], bad["param"]) == ("InvalidRequestError", "n")
    assert good["duration_ms"] > 0
    assert " info POST /v1/chat/completions 200 " in TextLines().format(lines[0])
    assert TextLines().format(lines[1]).endswith(" request_id=abc")
    for record in lines:
        for text in (JsonLines().format(record), TextLines().format(record)):
            assert SECRET not in text
            assert "\n" not in text


def test_a_path_cannot_forge_a_line(server: LiveServer, lines: list[logging.LogRecord]) -> None:
    server.get("/x%0a12:00:00%20info%20request%20status=200")
    wait_until(lambda: lines)
    assert "\n" not in TextLines().format(lines[0])


def test_a_failure_has_a_traceback_and_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"msg": "failed", "request_id": "r1"})
    try:
        raise ValueError("inside")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(JsonLines().format(record))
    assert line["request_id"] == "r1"
    assert "ValueError: inside" in line["traceback"]
    assert "ValueError: inside" in TextLines().format(record)


def test_levels_and_formats_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("mlxinfer", "uvicorn.error")
    before = [(n, logging.getLogger(n).handlers[:], logging.getLogger(n).level) for n in names]
    try:
        set_up_logging("json", "warning")
        logging.getLogger("mlxinfer.server").info("quiet")
        logging.getLogger("mlxinfer.server").warning("loud")
    finally:
        for name, handlers, level in before:
            logger = logging.getLogger(name)
            logger.handlers[:], logger.propagate = handlers, True
            logger.setLevel(level)
            logger.filters.clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "loud"
