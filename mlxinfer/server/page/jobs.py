"""Downloads and conversions: each a process of its own, which can be paused and cannot hurt others.

A process writes its progress as JSON lines to stderr and its result as JSON to stdout, a file.
To pause ends it by an interrupt: what has arrived stays on the disk, and to resume is to run it
again.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from tempfile import TemporaryFile
from typing import IO, Any

from ...errors import InvalidRequestError
from ..errors import HttpError

PROGRESS = {"MLXINFER_PROGRESS": "json"}  # of the environment of a job's process
MAX_RUNNING = 4
MAX_KEPT = 50  # jobs that have ended
KILL_S = 3.0  # after an interrupt: a thread may wait for a network that is silent
MAX_LINE = 4096  # characters of an error


class JobState(StrEnum):
    """The state of a job."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


INTERRUPTS = {"pause": JobState.PAUSED, "cancel": JobState.CANCELLED}


@dataclass(slots=True, eq=False)
class Job:
    """One download or conversion.

    Attributes:
        kind: "download" or "conversion".
        again: arguments with which it goes on after a pause.
        discard: removes what a cancelled job leaves.
        step, done, total: as the process said last; bytes, or weights of a conversion.
        result: JSON of a job that is done.
    """

    kind: str
    name: str
    arguments: Sequence[str]
    again: Sequence[str]
    discard: Callable[[], object]
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: JobState = JobState.RUNNING
    step: str = ""
    done: int = 0
    total: int = 0
    rate: float = 0.0  # a second, smoothed
    error: str | None = None
    result: Any = None
    wanted: JobState = JobState.RUNNING  # what a pause or an end of the process means
    process: "subprocess.Popen[str] | None" = None
    marked: tuple[float, int] = (0.0, 0)  # time and `done` of the last rate

    @property
    def ended(self) -> bool:
        return self.state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)

    def as_dict(self) -> dict[str, Any]:
        names = ("id", "kind", "name", "step", "done", "total", "rate", "error", "result")
        stopping = self.state is JobState.RUNNING and self.wanted is not JobState.RUNNING
        shown = "stopping" if stopping else str(self.state)
        return {"state": shown, **{name: getattr(self, name) for name in names}}


class Jobs:
    """All jobs of a server. Methods may be called from any thread."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Job]:
        return list(self._jobs.values())[::-1]

    def start(self, job: Job) -> Job:
        """Run a job; one of the same kind and name that is paused goes on instead.

        It takes the place of one of the same kind and name that failed.
        """
        with self._lock:
            same = [j for j in self._jobs.values() if (j.kind, j.name) == (job.kind, job.name)]
            open_ones = [other for other in same if not other.ended]
            if open_ones:
                job = open_ones[0]
            elif len([j for j in self._jobs.values() if not j.ended]) >= MAX_RUNNING:
                raise InvalidRequestError(f"{MAX_RUNNING} jobs run already; wait for one of them.")
            for other in same:
                if other.state is JobState.FAILED:
                    del self._jobs[other.id]
            self._jobs[job.id] = job
            self._forget_old()
            if job.process is None:
                self._run(job)
        return job

    def act(self, id: str, action: str) -> Job:
        """Pause, resume, cancel or dismiss a job; what has no effect in its state is ignored.

        To resume a failed job is to run it once more. A dismissed job is no longer listed.

        Raises:
            HttpError: there is no such job.
            InvalidRequestError: there is no such action.
        """
        job = self._jobs.get(id)
        if job is None:
            raise HttpError("not_found", "There is no such job.")
        if action == "resume":
            with self._lock:
                if job.state in (JobState.PAUSED, JobState.FAILED) and job.process is None:
                    self._run(job)
        elif action == "dismiss":
            if job.ended:
                self._jobs.pop(id, None)
        elif action in INTERRUPTS:
            self._interrupt(job, INTERRUPTS[action])
        else:
            raise InvalidRequestError.of(
                "action", f"is {action[:40]!r}; expected pause, resume, cancel or dismiss."
            )
        return job

    def close(self) -> None:
        for job in self.all():
            self._interrupt(job, JobState.PAUSED)

    def _run(self, job: Job) -> None:
        """Start the process of a job and a thread that watches it, or let the job fail."""
        arguments = job.again if job.state is JobState.PAUSED else job.arguments
        job.state = job.wanted = JobState.RUNNING
        job.error, job.rate, job.marked = None, 0.0, (0.0, 0)
        try:
            process, said = self._started(arguments)
        except OSError as error:
            job.state, job.error = JobState.FAILED, f"It does not start: {error.strerror}."
            return
        job.process = process
        given = job, process, said
        watch = threading.Thread(target=self._watch, args=given, name="mlxinfer-job", daemon=True)
        try:
            watch.start()
        except RuntimeError as error:
            process.kill()
            self._ended(*given, f"It does not start: {error}.")

    def _started(self, arguments: Sequence[str]) -> tuple["subprocess.Popen[str]", IO[str]]:
        said = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C at the server's terminal is not meant for it
                env={**os.environ, **PROGRESS},
            )
        except OSError:
            said.close()
            raise
        return process, said

    def _watch(self, job: Job, process: "subprocess.Popen[str]", said: IO[str]) -> None:
        """Follow a process to its end. Whatever happens here, the job ends with it."""
        assert process.stderr is not None
        problem = ""
        try:
            for line in process.stderr:
                if line.startswith("{"):
                    _note(job, line)
                elif line.startswith("error: "):
                    problem = _for_a_page(line.removeprefix("error: ").strip()[:MAX_LINE])
        except Exception as error:  # a job that nobody follows would run for ever
            problem = f"Its progress cannot be followed: {error}."
            process.kill()
        self._ended(job, process, said, problem)

    def _ended(
        self, job: Job, process: "subprocess.Popen[str]", said: IO[str], problem: str
    ) -> None:
        assert process.stderr is not None
        process.stderr.close()
        code = process.wait()
        said.seek(0)
        result = said.read()
        said.close()
        job.process = None
        _end(job, code, result, problem)

    def _interrupt(self, job: Job, wanted: JobState) -> None:
        process = job.process
        if process is None:
            if job.state is JobState.PAUSED and wanted is JobState.CANCELLED:
                job.state = wanted
                job.discard()
            return
        job.wanted = wanted
        process.send_signal(signal.SIGINT)
        killer = threading.Timer(KILL_S, process.kill)
        killer.daemon = True
        killer.start()

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.ended]
        for job in ended[: max(len(ended) - MAX_KEPT, 0)]:
            del self._jobs[job.id]


def _for_a_page(message: str) -> str:
    first, *sentences = re.split(r"(?<=[.!?]) ", message)
    plain = [text for text in sentences if "`" not in text and "mlxinfer " not in text]
    return " ".join([first, *plain])


def _note(job: Job, line: str) -> None:
    try:
        said = json.loads(line)
        step, done, total = str(said["step"]), int(said["done"]), int(said["total"])
    except (ValueError, KeyError, TypeError):
        return
    now_s = time.monotonic()
    since_s, before = job.marked
    if step != job.step or not since_s:
        job.marked, job.rate = (now_s, done), 0.0
    elif now_s - since_s > 0.5:
        speed = max(done - before, 0) / (now_s - since_s)
        job.rate = speed if not job.rate else 0.7 * job.rate + 0.3 * speed
        job.marked = (now_s, done)
    job.step, job.done, job.total = step, done, total


def _end(job: Job, code: int, said: str, problem: str) -> None:
    if job.wanted is not JobState.RUNNING and code != 0:
        job.state = job.wanted
        if job.state is JobState.CANCELLED:
            job.discard()
        return
    try:
        job.result = json.loads(said) if said else None
    except ValueError:
        code = code or 1
    if code == 0:
        job.state, job.done = JobState.DONE, job.total
    else:
        job.state, job.error = JobState.FAILED, problem or f"The process ended with status {code}."
