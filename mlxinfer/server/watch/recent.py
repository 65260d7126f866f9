"""The last warnings and errors of the log, for the dashboard. They hold no text of prompts."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KEPT = 50
MAX_CHARS = 500  # of a message


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the log."""

    time_s: float  # since 1970
    level: str
    message: str
    model: str | None
    request_id: str | None


class RecentProblems(logging.Handler):
    """Keeps the last lines from level warning up, in memory only."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[Problem] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        said = vars(record)
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message = f"{message}: {type(record.exc_info[1]).__name__}"
        self._lines.append(
            Problem(
                time_s=record.created,
                level=record.levelname.lower(),
                message=message[:MAX_CHARS],
                model=said.get("model"),
                request_id=said.get("request_id"),
            )
        )

    def newest(self) -> list[Problem]:
        """The lines, the newest first."""
        return list(self._lines)[::-1]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Listen to the server's loggers while the block runs."""
        logger = logging.getLogger("mlxinfer")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
