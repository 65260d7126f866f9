"""Untrusted work in a process that is killed when it takes too much time or memory.

Grammars and chat templates come from strangers, and no thread can be interrupted from outside. So
both are tried in a process of their own first. The parent's side is `KillableProcess`; the process
runs a module that calls `serve`. Messages on stdin and stdout are JSON after their length (4 bytes,
big-endian).
"""

import asyncio
import contextlib
import io
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from .errors import OverloadedError
from .threads import run_apart

HEADER = struct.Struct(">I")
MEMORY_POLL_S = 0.02
KILLED_BY_MEMORY = 77  # exit status
START_SECONDS = 30.0
END_SECONDS = 5.0  # for a process after its streams are closed
# Exit statuses of a process that did nothing wrong: it was idle, or a signal came from outside. A
# job that takes too much ends it otherwise.
FROM_OUTSIDE = {0} | {
    -number
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
}


class EndedError(Exception):
    """The process ended during a job; `is_to_blame` says whether the job caused it."""

    def __init__(self, *, is_to_blame: bool) -> None:
        super().__init__()
        self.is_to_blame = is_to_blame


class KillableProcess:
    """A process that does one job at a time; a killed one is replaced at the next job.

    Safe to use from several threads, which wait for each other. A job runs on a thread of its own
    to its end: a caller that Ctrl-C interrupts leaves no reply unread and no lock taken.

    Args:
        module: the module to run; it calls `serve`.
        greeting: a job that does nothing, sent first: the time of the start is not the job's time.
        max_seconds: limit of one job, and of the wait for other threads' jobs.
        max_bytes: memory that the process may take.

    Attributes:
        num_started: processes started so far.
    """

    def __init__(
        self,
        module: str,
        greeting: dict[str, Any],
        *,
        max_seconds: float = 5.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self.num_started = 0
        self._module, self._greeting = module, greeting
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def ask(self, job: Any) -> Any:
        """Return the reply to a job.

        Raises:
            EndedError: the process ended twice from outside, or the job took too much.
            OverloadedError: the jobs of other threads took all the time.
        """
        return run_apart(partial(self._ask, job), "mlxinfer-killable")

    def close(self) -> None:
        """End the process; the next job starts another."""
        run_apart(self._close, "mlxinfer-killable")

    def _close(self) -> None:
        with self._turn:
            self._stop()

    def _ask(self, job: Any) -> Any:
        """Return the reply, of a second process if the first was ended from outside."""
        if not self._turn.acquire(timeout=self.max_seconds):
            raise OverloadedError("Others wait for the same check; try again.")
        try:
            try:
                return self._reply(job)
            except EndedError as ended:
                if ended.is_to_blame:
                    raise
            return self._reply(job)
        finally:
            self._turn.release()

    def _reply(self, job: Any) -> Any:
        try:
            return _exchange(self._running(), job, self.max_seconds)
        except EndedError:
            self._stop()
            raise

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                _command(self._module, self.max_bytes),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
            self.num_started += 1
            self._finalizer = weakref.finalize(self, _end, self._process)
            with contextlib.suppress(EndedError):  # the job itself will show that
                _exchange(self._process, self._greeting, START_SECONDS)
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


async def ask_once(module: str, job: Any, *, max_seconds: float, max_bytes: int = 1 << 30) -> Any:
    """Return the reply to a job, of a process for it alone; a caller that is cancelled kills it.

    Args:
        module: the module to run; it calls `serve`.
        job: of the process.
        max_seconds: limit of the job, the start included.
        max_bytes: memory that the process may take.

    Raises:
        EndedError: the job took too much.
    """
    data = json.dumps(job).encode()
    process = await asyncio.create_subprocess_exec(
        *_command(module, max_bytes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
    )
    try:
        async with asyncio.timeout(max_seconds):
            reply, _ = await process.communicate(HEADER.pack(len(data)) + data)
    except TimeoutError:
        raise EndedError(is_to_blame=True) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if len(reply) < HEADER.size:
        raise EndedError(is_to_blame=True)
    return json.loads(reply[HEADER.size :])


def _command(module: str, max_bytes: int) -> list[str]:
    return [sys.executable, "-P", "-m", module, str(max_bytes)]


def _environment() -> dict[str, str]:
    """The environment of a process that finds this package."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _exchange(process: "subprocess.Popen[bytes]", job: Any, seconds: float) -> Any:
    """Send a job and return its reply; raise EndedError where the process ended during the job."""
    assert process.stdin is not None
    assert process.stdout is not None
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    waiting = threading.Timer(seconds, give_up)
    waiting.start()
    reply = None
    try:
        send(process.stdin, job)  # type: ignore[arg-type]
        reply = receive(process.stdout)  # type: ignore[arg-type]
    except (OSError, ValueError):  # it died while it was written to, or halfway through
        pass
    finally:
        waiting.cancel()
    if reply is None:
        raise EndedError(is_to_blame=is_late.is_set() or not _was_ended(process))
    return reply


def _was_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process with closed streams was ended by a signal from outside."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(END_SECONDS) in FROM_OUTSIDE
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


# -- in the process -------------------------------------------------------------------------------


def serve(answer: Callable[[Any], Any], *, idle_s: float | None = None) -> None:
    """Answer jobs until the stream ends; the first argument of the program is `max_bytes`.

    With `idle_s` the process also ends when it has waited for so many seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    _watch_memory(int(sys.argv[1]))
    stream = io.FileIO(sys.stdin.fileno())  # without a buffer: `select` sees all that is unread
    while select.select([stream], [], [], idle_s)[0]:
        job = receive(stream)
        if job is None:
            break
        send(sys.stdout.buffer, answer(job))


def _watch_memory(max_bytes: int) -> None:
    """End the process when its memory grows by more than `max_bytes`.

    Where the system sets no limit, a thread polls. Linux counts the parent's peak too, so growth
    is compared.
    """
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss

    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    allowed = peak_bytes() + max_bytes

    def watch() -> None:
        while peak_bytes() < allowed:
            time.sleep(MEMORY_POLL_S)
        os._exit(KILLED_BY_MEMORY)

    threading.Thread(target=watch, daemon=True).start()


def receive(stream: BinaryIO) -> Any:
    """Return the next message, None at the end of the stream."""
    header = _read(stream, HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(_read(stream, *HEADER.unpack(header)))


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, fewer at the end of the stream."""
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()
