"""Whole processes: run to their end, asked line by line, or serving HTTP. Knows command lines."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import Figures
from mlxinfer.errors import MlxinferError

ROOT = Path(__file__).resolve().parents[1]
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
LAUNCHER = """
import os, sys, time
started = time.perf_counter()
null = os.open(os.devnull, os.O_RDWR)
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ,
                       file_actions=[(os.POSIX_SPAWN_DUP2, null, 0)])
_, status, usage = os.wait4(child, 0)
print([time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss])
sys.exit(os.waitstatus_to_exitcode(status))
"""
START_S, STOP_S = 120.0, 20.0  # of servers


@dataclass(frozen=True, slots=True)
class Ran:
    """The cost of one process, and the lines that it wrote to stdout."""

    cost: Figures  # wall_s, cpu_s, peak_bytes
    lines: list[str]


def run_python(*arguments: str, **environment: str) -> Ran:
    """Run Python with these arguments to its end.

    A small process in between starts it: a child's peak counts from the memory of its parent.

    Raises:
        MlxinferError: it failed; the message has the end of what it wrote to stderr.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )
    if done.returncode:
        tail = done.stderr.strip()[-600:]
        raise MlxinferError(f"{' '.join(arguments)} exited with {done.returncode}: {tail}")
    *lines, last = done.stdout.splitlines()
    wall_s, cpu_s, peak = json.loads(last)
    return Ran({"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": peak * RSS_UNIT}, lines)


class Peer:
    """A process that answers each line of JSON with one."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def tell(self, value: Any) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        print(json.dumps(value), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """Read a line.

        Raises:
            MlxinferError: the process ended.
        """
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise MlxinferError(f"{self.process.args!r} ended before it answered.")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[int, int]]:
    """The port and the process id of `mlxinfer serve` with these options, once it is ready.

    Raises:
        MlxinferError: it did not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "mlxinfer.cli", "serve", *options, "--port", str(port)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        try:
            if not _wait(process, port):
                errors.seek(0)
                tail = errors.read().decode(errors="replace")[-600:]
                raise MlxinferError(f"The server did not start: {tail}")
            yield port, process.pid
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of the loopback interface that is free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Whether the server is ready before it ends and before the time is over."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    return False
