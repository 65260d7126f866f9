"""Jobs that come at once are shared among a pool's processes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from mlxinfer.killable import KillablePool, KillableProcess, Packet
from tests.waiting import wait_until

EACH = 8  # jobs of a process


def test_jobs_that_come_at_once_go_to_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody counts in time would get them all while the other one sleeps."""
    processes = [KillableProcess("mlxinfer.server.pdf", None) for _ in "ab"]
    pool = KillablePool(*processes)
    answered: list[KillableProcess] = []

    def answer(process: KillableProcess, *_: object) -> Packet:
        answered.append(process)
        return Packet(None)

    monkeypatch.setattr(KillableProcess, "_reply_once", answer)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2 * EACH) as threads, ExitStack() as turns:
            for process in processes:
                turns.enter_context(process._turn)
            jobs = [threads.submit(pool.ask, Packet(None)) for _ in range(2 * EACH)]
            wait_until(lambda: sum(process.num_jobs for process in processes) == 2 * EACH)
            counts = [process.num_jobs for process in processes]
            turns.close()
            for job in jobs:
                job.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert counts == [EACH, EACH]
    assert [answered.count(process) for process in processes] == [EACH, EACH]
