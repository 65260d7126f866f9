"""Jobs of the page that do not start, or whose watcher fails: each ends and says why."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxinfer.server.page import jobs as module
from mlxinfer.server.page.jobs import Job, Jobs, JobState
from tests.waiting import wait_until

LONG = "import sys, time; print('{}', file=sys.stderr, flush=True); time.sleep(600)"


def job(program: str = LONG) -> Job:
    return Job("download", "org/model", ["-c", program], ["-c", program], lambda: None)


def test_a_job_whose_program_is_missing_fails_and_can_be_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "python"
    jobs = Jobs([str(program)])
    failed = jobs.start(job("print('{\"a\": 1}')"))
    assert failed.as_dict()["state"] == "failed"
    assert "No such file" in str(failed.error)
    program.symlink_to(sys.executable)
    jobs.act(failed.id, "resume")
    wait_until(lambda: failed.ended)
    assert failed.state is JobState.DONE
    assert failed.result == {"a": 1}


def test_a_job_without_a_thread_to_watch_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    jobs = Jobs([sys.executable])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        failed = jobs.start(job())
    assert failed.state is JobState.FAILED
    assert "new thread" in str(failed.error)
    assert failed.process is None
    again = jobs.start(job("pass"))
    assert jobs.all() == [again]
    wait_until(lambda: again.ended)
    assert again.state is JobState.DONE


def test_a_job_whose_watcher_dies_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(job: Job, line: str) -> None:
        raise OverflowError("a number")

    monkeypatch.setattr(module, "_note", note)
    failed = Jobs([sys.executable]).start(job())
    wait_until(lambda: failed.ended)
    assert failed.state is JobState.FAILED
    assert "a number" in str(failed.error)


def test_a_process_that_writes_much_ends() -> None:
    program = "import sys; print('[' + '1,' * 10**6 + '1]'); print('{' * 10**6, file=sys.stderr)"
    done = Jobs([sys.executable]).start(job(program))
    wait_until(lambda: done.ended)
    assert done.state is JobState.DONE
    assert len(done.result) == 10**6 + 1


def test_two_starts_of_one_job_run_it_once() -> None:
    jobs = Jobs([sys.executable])
    with ThreadPoolExecutor() as pool:
        list(pool.map(jobs.start, [job(), job()]))
    (one,) = jobs.all()
    jobs.act(one.id, "cancel")
    wait_until(lambda: one.ended)
    assert one.state is JobState.CANCELLED
