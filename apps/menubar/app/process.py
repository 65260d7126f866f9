"""A server as a process of its own, which outlives the app that started it.

Its process id and start time stand in a file, so that a later run of the app knows the server that
an earlier one started. The app ends no other process: an id that was given to another process since
has another start time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from calendar import timegm
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import MlxinferError

COMMAND = (sys.executable, "-m", "mlxinfer.cli")
STOP_S = 40.0  # from SIGTERM to SIGKILL: longer than a server drains
TOLERANCE_S = 3.0  # of `ps`, which derives start times from the time since boot
LOG_TAIL = 16 << 10  # bytes that are searched for the reason of an end
MAX_PROBLEM = 500  # characters


class StartError(MlxinferError, code="start_error"):
    """The server was not started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """The process of a server: identified by its id and its start, seconds since 1970."""

    pid: int
    started_s: float
    url: str


class ServerProcess:
    """At most one server, started by this run of the app or an earlier one.

    Args:
        folder: of the record and the log.
        command: the command line program.
    """

    def __init__(self, folder: Path, command: Sequence[str] = COMMAND) -> None:
        self._folder = folder
        self._command = list(command)
        self._child: subprocess.Popen[bytes] | None = None  # None: of an earlier run
        self._record: ProcessRecord | None = None

    @property
    def log_path(self) -> Path:
        return self._folder / "server.log"

    @property
    def url(self) -> str | None:
        """Address of the server that runs or has just ended; None: there is none."""
        return None if self._record is None else self._record.url

    def start(self, url: str, port: int, environment: Mapping[str, str]) -> None:
        """Start `mlxinfer serve` on this machine; returns before it answers.

        Args:
            url: its address.
            port: of the address.
            environment: variables beside those of this process.

        Raises:
            StartError: it runs already, or the system did not start it.
        """
        if self.alive():
            raise StartError(f"The server runs already, at {self.url}.")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with self.log_path.open("wb") as log:
                child = subprocess.Popen(
                    [*self._command, "serve", "--port", str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # it outlives the app and its terminal
                    env={**os.environ, **environment},
                )
        except OSError as error:
            raise StartError(f"The server cannot be started: {error}.") from error
        self._child = child
        self._remember(
            ProcessRecord(pid=child.pid, started_s=start_of(child.pid) or time.time(), url=url)
        )

    def attach(self) -> None:
        """Find the server of an earlier run."""
        try:
            said = json.loads(self._record_path.read_text())
            record = ProcessRecord(
                pid=int(said["pid"]), started_s=float(said["started_s"]), url=str(said["url"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return
        started_s = start_of(record.pid)
        if started_s is not None and abs(started_s - record.started_s) <= TOLERANCE_S:
            self._record = record
        else:
            self._record_path.unlink(missing_ok=True)

    def alive(self) -> bool:
        if self._record is None:
            return False
        if self._child is not None:
            return self._child.poll() is None
        return exists(self._record.pid)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End the server: running requests get its drain time; after `timeout_s` it is killed."""
        if self._record is None:
            return
        pid = self._record.pid
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.alive():
                os.kill(pid, number)
                self._wait(timeout_s)
        self.forget()

    def end(self) -> None:
        """Let the server end by itself, after its running requests."""
        if self._record is not None and self.alive():
            os.kill(self._record.pid, signal.SIGTERM)

    def forget(self) -> str:
        """Drop a server that has ended; returns the reason as far as it is known."""
        code = None if self._child is None else self._child.poll()
        self._record = self._child = None
        self._record_path.unlink(missing_ok=True)
        return problem_of(self.log_path) or (
            "it has ended" if code is None else f"its process ended with status {code}"
        )

    @property
    def _record_path(self) -> Path:
        return self._folder / "server.json"

    def _remember(self, record: ProcessRecord) -> None:
        self._record = record
        self._record_path.write_text(json.dumps(asdict(record)))

    def _wait(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < end_s:
            time.sleep(0.05)


def exists(pid: int) -> bool:
    """Whether there is a process of this id that this user may end."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def start_of(pid: int) -> float | None:
    """When a process was started, seconds since 1970; None: it is not there, or `ps` is not."""
    try:
        done = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
        )
        return float(timegm(time.strptime(done.stdout.strip(), "%a %b %d %H:%M:%S %Y")))
    except (OSError, ValueError):
        return None


def problem_of(log: Path) -> str | None:
    """The last error in a server's log, as `mlxinfer` writes it; None: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1][:MAX_PROBLEM].replace("`", "") if errors else None
