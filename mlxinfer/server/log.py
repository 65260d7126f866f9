"""The server's log: on stderr, one line an event, as text or JSON; its last warnings in memory.

No line holds a text of prompts.

Loggers: mlxinfer.server (what happens), mlxinfer.access (a line a request), uvicorn.error.
"""

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
ACCESS = "mlxinfer.access"
_FIRST = ("method", "path", "status", "duration_ms")  # of a request
_LAST = ("client", "request_id", "answer_id")
_NOISE = frozenset(
    {
        "ASGI callable returned without starting response.",  # the client had left: logged by us
        "ASGI callable returned without completing response.",
    }
)

KEPT = 50  # warnings and errors, for the dashboard
MAX_CHARS = 500  # of the message of each


def set_up_logging(format: str, level: str) -> None:
    """Send the server's loggers to stderr, in `format` "text" or "json", from `level` up."""
    handler = StderrLines(json_line if format == "json" else text_line)
    for name in ("mlxinfer", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(max(uvicorn.level, logging.WARNING))
    uvicorn.addFilter(lambda record: record.getMessage() not in _NOISE)


class StderrLines(logging.Handler):
    """Writes each record as `line` gives it to the current sys.stderr, which may be replaced."""

    def __init__(self, line: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self._line(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # stderr was closed: that must not end a request
            self.handleError(record)


def json_line(record: logging.LogRecord) -> str:
    """{"time": …, "level": …, "logger": …, "message": …, and what the record adds}."""
    line: dict[str, Any] = {
        "time": _iso(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
        **extras(record),
    }
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(line, ensure_ascii=False, default=str)


def text_line(record: logging.LogRecord) -> str:
    """`2026-11-26 12:00:00 info POST /v1/messages 200 83.1 ms model=demo …`, and a traceback.

    What people look for first comes first.
    """
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    said = extras(record)
    message = record.getMessage()
    if record.name == ACCESS:
        message = " ".join([*(_quoted(said.pop(name)) for name in _FIRST), "ms"])
    last = {name: said.pop(name) for name in _LAST if name in said}
    pairs = [f"{key}={_quoted(value)}" for key, value in (said | last).items()]
    line = " ".join([clock, record.levelname.lower(), message, *pairs])
    if record.exc_info:
        line += "\n" + logging.Formatter().formatException(record.exc_info)
    return line


def extras(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and v is not None}


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _iso(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


class RecentProblems(logging.Handler):
    """Keeps the last lines from level warning up, in memory only."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        said = vars(record)
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message = f"{message}: {type(record.exc_info[1]).__name__}"
        self._lines.append(
            {
                "time_s": record.created,  # since 1970
                "level": record.levelname.lower(),
                "message": message[:MAX_CHARS],
                "model": said.get("model"),
                "request_id": said.get("request_id"),
            }
        )

    def newest(self) -> list[dict[str, Any]]:
        return list(self._lines)[::-1]

    @contextmanager
    def kept(self) -> Iterator[None]:
        logger = logging.getLogger("mlxinfer")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
