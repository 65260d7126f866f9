"""What self-checks found, and what kernels took, kept in a file so that each is done once.

A check is marked before it begins: where it takes the whole process with it, the mark is still
there the next time, and stands for a kernel that crashes. While one process checks, others wait for
it, so that a mark is never that of a check still under way; a lock ends with its process.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from math import exp, log
from pathlib import Path
from typing import Any

OK = "ok"  # agrees with its twin
WRONG = "wrong"  # computes something else
FAILED = "failed"  # is not compiled, or not run
CRASHED = "crashed"  # ended the process that checked it
TWIN = "twin"  # there is no Metal here: nothing was run
_CHECKING = "checking"
STATUSES = (OK, WRONG, FAILED, CRASHED, TWIN)
WORTH = 1.05  # a kernel is used where it is that much faster than MLX's own operations


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-check of a variant found.

    Attributes:
        status: OK, WRONG, FAILED, CRASHED or TWIN.
        error: the largest difference, of the output that differed most for its tolerance.
        tolerance: of that output.
        detail: for people; empty where there is nothing to say.
        times: of what is right, where it was timed: sequences and tokens before them -> seconds
            of the kernel, and of MLX's own operations.
    """

    status: str
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def speed(self) -> float | None:
        """How much faster than MLX's own operations, the geometric mean; None: not timed."""
        if not self.times:
            return None
        return exp(
            sum(log(mlx_s / kernel_s) for kernel_s, mlx_s in self.times.values()) / len(self.times)
        )

    @property
    def usable(self) -> bool:
        """Whether the kernel may be used: it is right, and not as slow as what it replaces."""
        return self.status == OK and (self.speed is None or self.speed >= WORTH)


_FIELDS = {each.name for each in fields(Verdict)}


class Verdicts:
    """The verdicts of one environment: chip, system and versions.

    Args:
        folder: made where it is not there.
        environment: what verdicts depend on beside kernel and variant, in words.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
        self.path = folder / f"{digest}.json"
        self._environment = environment

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Wait until no other process checks, and keep others waiting meanwhile.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> dict[str, Verdict]:
        """What is known, by key. A damaged file holds nothing."""
        entries = self._entries().items()
        return {key: Verdict(**entry) for key, entry in entries if entry["status"] != _CHECKING}

    def unfinished(self) -> list[str]:
        """Keys of checks that began and did not end; read exclusively, of checks that crashed."""
        entries = self._entries().items()
        return [key for key, entry in entries if entry["status"] == _CHECKING]

    def begin(self, key: str) -> None:
        """Mark that `key` is being checked."""
        self._put(key, {"status": _CHECKING})

    def put(self, key: str, verdict: Verdict) -> None:
        """Remember what was found."""
        self._put(key, asdict(verdict))

    def forget(self, key: str) -> None:
        """Know nothing about `key`."""
        self._write({name: entry for name, entry in self._entries().items() if name != key})

    def _put(self, key: str, entry: dict[str, Any]) -> None:
        self._write({**self._entries(), key: entry})

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            entries = json.loads(self.path.read_text())["verdicts"]
            return {key: entry for key, entry in entries.items() if _sound(entry)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:
        """Replace the file as a whole: readers and crashes never see half of it."""
        text = json.dumps({"environment": self._environment, "verdicts": entries}, indent=1)
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a GPU fault may take the whole machine with it
        draft.replace(self.path)


def _sound(entry: object) -> bool:
    """Whether an entry of the file is one that was written there."""
    if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
        return False
    times = entry.get("times", {})
    if not isinstance(times, dict) or not all(map(_sound_pair, times.values())):
        return False
    return entry.get("status") in (*STATUSES, _CHECKING)


def _sound_pair(pair: object) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(isinstance(seconds, float) and seconds > 0 for seconds in pair)
