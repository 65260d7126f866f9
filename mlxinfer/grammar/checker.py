"""Tries grammars out in a process of their own, which is killed when it takes too much.

Knows processes and time; what a grammar is, `check.py` knows.
"""

import contextlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError, OverloadedError
from .schema import at
from .spec import GrammarSpec

START_SECONDS = 30.0
NOTHING = {"source": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', "schemas": []}
PROGRAM = Path(__file__).with_name("check.py")


class Checker:
    """One process that lives on between grammars; a new one takes the place of one that was killed.

    Safe to use from several threads, which wait for each other.

    Args:
        max_seconds: what one grammar may take, and at most how long one waits for its turn.
        max_bytes: what the process may take.
    """

    def __init__(self, *, max_seconds: float = 5.0, max_bytes: int = 1 << 30) -> None:
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self.num_started = 0
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def check(
        self, spec: GrammarSpec, special: Mapping[int, str] | None = None, vocab_size: int = 0
    ) -> None:
        """Return if a grammar can be compiled.

        Args:
            spec: of the grammar.
            special: control tokens that it may name, by id.
            vocab_size: up to which ids may be named.

        Raises:
            InvalidRequestError: it cannot; with the place in the request and a JSON pointer.
            OverloadedError: others were checked all the time.
        """
        job = {
            "source": spec.source,
            "schemas": [[p.place, p.text] for p in spec.schemas],
            "special": special or {},
            "vocab_size": vocab_size,
        }
        if not self._turn.acquire(timeout=self.max_seconds):
            raise OverloadedError("Other grammars are being compiled; try again.")
        try:
            reply = self._ask(job)
        finally:
            self._turn.release()
        if reply is None:
            raise InvalidRequestError(
                f"{spec.place} takes more than {self.max_seconds:g} s or "
                f"{self.max_bytes / 1e6:.0f} MB to compile; make it simpler.",
                param=spec.place,
            )
        if reply:
            raise at(reply["place"] or spec.place, reply["pointer"], reply["error"])

    def close(self) -> None:
        """End the process; the next check starts another."""
        with self._turn:
            self._stop()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """The reply; None: the process was killed or died over it."""
        reply = _exchange(self._running(), job, self.max_seconds)
        if reply is None:
            self._stop()
        return reply

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(self.max_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self.num_started += 1
            self._finalizer = weakref.finalize(self, _end, self._process)
            _exchange(self._process, NOTHING, START_SECONDS)  # starting is not the grammar's time
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def _exchange(
    process: "subprocess.Popen[bytes]", job: dict[str, Any], seconds: float
) -> dict[str, Any] | None:
    """Send a job and wait for its reply; None: the process was killed or died over it."""
    from .check import receive, send  # imports llguidance: the first grammar pays for it

    assert process.stdin is not None
    assert process.stdout is not None
    waiting = threading.Timer(seconds, process.kill)
    waiting.start()
    try:
        send(process.stdin, {"special": {}, "vocab_size": 0, **job})  # type: ignore[arg-type]
        reply: dict[str, Any] | None = receive(process.stdout)  # type: ignore[arg-type]
        return reply
    except (OSError, ValueError):  # it died while it was written to, or halfway through
        return None
    finally:
        waiting.cancel()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
