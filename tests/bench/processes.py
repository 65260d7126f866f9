"""Whole processes: their time, their processor time and their peak of memory."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlxinfer.errors import MlxinferError

ROOT = Path(__file__).resolve().parents[2]
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
LAUNCHER = """
import os, sys, time
started = time.perf_counter()
null = os.open(os.devnull, os.O_RDWR)
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ,
                       file_actions=[(os.POSIX_SPAWN_DUP2, null, n) for n in (0, 1)])
_, status, usage = os.wait4(child, 0)
print([time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss])
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """The cost of one process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


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
    wall_s, cpu_s, peak = json.loads(done.stdout.splitlines()[-1])
    return Ran(wall_s, cpu_s, peak * RSS_UNIT)
