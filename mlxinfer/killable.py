"""Untrusted work in a process that is killed when it takes too much time or memory.

Grammars, chat templates, PDFs, pictures and videos come from strangers, and no thread can be
interrupted from outside. So they are read in processes of their own. The parent's side is
`KillableProcess`, or `KillablePool` for several; a process runs a module that calls `serve`. A
message on stdin or stdout is JSON and bytes behind it, after both lengths (4 and 8 bytes,
big-endian).
"""

import contextlib
import io
import json
import math
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
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .errors import OverloadedError
from .threads import run_apart

HEADER = struct.Struct(">IQ")
MEMORY_POLL_S = 0.02
POLL_S = 0.05  # between two looks at whether a caller has left
MAX_WAITING = 256  # jobs that wait for one process; each of them ends, so that a wait ends as well
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


class Packet(NamedTuple):
    """A job, or the reply to one."""

    value: Any  # plain data
    data: bytes = b""  # what is large, or no text


def _stays() -> bool:
    return False


class KillableProcess:
    """A process that does one job at a time; a killed one is replaced at the next job.

    Safe to use from several threads, which wait for each other for as long as the jobs ahead take.
    A job runs on a thread of its own to its end: a caller that Ctrl-C interrupts leaves no reply
    unread and no lock taken.

    Args:
        module: the module to run; it calls `serve`.
        greeting: a job that does nothing, sent first: the time of the start is not the job's time.
    """

    def __init__(
        self, module: str, greeting: Any, *, max_seconds: float = 5.0, max_bytes: int = 1 << 30
    ) -> None:
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self.num_started = 0
        self.num_jobs = 0
        self._module, self._greeting = module, Packet(greeting)
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def ask(self, job: Packet, abandoned: Callable[[], bool] = _stays) -> Packet:
        """Return the reply to a job.

        Args:
            abandoned: says whether the caller has left. The job then ends with its process.

        Raises:
            EndedError: the process ended twice from outside, or the job took too much.
            OverloadedError: too many jobs wait.
            CancelledError: the caller has left.
        """
        return run_apart(partial(self._ask, job, abandoned), "mlxinfer-killable")

    def _ask(self, job: Packet, abandoned: Callable[[], bool]) -> Packet:
        self.count()
        return self.reply(job, abandoned)

    def close(self) -> None:
        run_apart(self._close, "mlxinfer-killable")

    def _close(self) -> None:
        with self._turn:
            self._stop()

    def count(self) -> None:
        """Count a job that `reply` is then called with; raise as `ask` does where too many wait."""
        with self._counting:
            if self.num_jobs > MAX_WAITING:
                raise OverloadedError("Too many others wait for the same check; try again.")
            self.num_jobs += 1

    def reply(self, job: Packet, abandoned: Callable[[], bool]) -> Packet:
        """Return the reply to a counted job, of a second process if a signal ended the first."""
        try:
            while not self._turn.acquire(timeout=POLL_S):
                _raise_if(abandoned)
            try:
                return self._reply_once(job, abandoned)
            except EndedError as ended:
                if ended.is_to_blame:
                    raise
                return self._reply_once(job, abandoned)
            finally:
                self._turn.release()
        finally:
            with self._counting:
                self.num_jobs -= 1

    def _reply_once(self, job: Packet, abandoned: Callable[[], bool]) -> Packet:
        _raise_if(abandoned)
        try:
            return _exchange(self._running(), job, self.max_seconds, abandoned)
        except EndedError:
            self._stop()
            _raise_if(abandoned)
            raise

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(self.max_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
            self.num_started += 1
            self._finalizer = weakref.finalize(self, _end, self._process)
            with contextlib.suppress(EndedError):  # the job itself will show that
                _exchange(self._process, self._greeting, START_SECONDS, _stays)
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


class KillablePool:
    """Several processes for jobs of one kind; a job goes to the one with the fewest."""

    def __init__(self, *processes: KillableProcess) -> None:
        self._processes = processes
        self._choosing = threading.Lock()

    def ask(self, job: Packet, abandoned: Callable[[], bool] = _stays) -> Packet:
        return run_apart(partial(self._ask, job, abandoned), "mlxinfer-killable")

    def _ask(self, job: Packet, abandoned: Callable[[], bool]) -> Packet:
        with self._choosing:  # jobs that come at once do not choose the same process
            chosen = min(self._processes, key=lambda process: process.num_jobs)
            chosen.count()
        return chosen.reply(job, abandoned)

    def close(self) -> None:
        for process in self._processes:
            process.close()


def _raise_if(abandoned: Callable[[], bool]) -> None:
    if abandoned():
        raise CancelledError


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _exchange(
    process: "subprocess.Popen[bytes]", job: Packet, seconds: float, abandoned: Callable[[], bool]
) -> Packet:
    """Send a job and return its reply; raise EndedError where the process ended during the job."""
    assert process.stdin is not None
    assert process.stdout is not None
    is_late, is_done = threading.Event(), threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + seconds
        while not is_done.wait(max(0.0, min(POLL_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or abandoned():
                is_late.set()
                process.kill()
                return

    threading.Thread(target=watch, name="mlxinfer-killable-watch", daemon=True).start()
    reply = None
    try:
        send(process.stdin, job)  # type: ignore[arg-type]
        reply = receive(process.stdout)  # type: ignore[arg-type]
    except (OSError, ValueError):  # it died while it was written to, or halfway through
        pass
    finally:
        is_done.set()
    if reply is None:
        raise EndedError(is_to_blame=is_late.is_set() or not _was_ended(process))
    return reply


def _was_ended(process: "subprocess.Popen[bytes]") -> bool:
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


def serve(answer: Callable[[Packet], Packet], *, idle_s: float | None = None) -> None:
    """Answer jobs until the stream ends; the first argument of the program is `max_bytes`.

    With `idle_s` the process also ends when it has waited for that time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    _watch_memory(int(sys.argv[1]))
    stream = io.FileIO(sys.stdin.fileno())  # without a buffer: `select` sees all that is unread
    while select.select([stream], [], [], idle_s)[0]:
        job = receive(stream)
        if job is None:
            break
        send(sys.stdout.buffer, answer(job))


def limit_cpu(seconds: float) -> None:
    """End the process when it has used so much more CPU time, and also where its parent is gone."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), hard))


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


def receive(stream: BinaryIO) -> Packet | None:
    header = _read(stream, HEADER.size)
    if len(header) < HEADER.size:
        return None
    num_json, num_data = HEADER.unpack(header)
    value = json.loads(_read(stream, num_json))
    data = _read(stream, num_data)
    if len(data) < num_data:
        raise ValueError("The stream ended within a message.")
    return Packet(value, data)


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, fewer at the end of the stream."""
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def send(stream: BinaryIO, message: Packet) -> None:
    text = json.dumps(message.value).encode()
    stream.write(HEADER.pack(len(text), len(message.data)) + text + message.data)
    stream.flush()
