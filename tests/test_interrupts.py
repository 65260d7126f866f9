"""Ctrl-C at any point of any call: the model stays whole, and what was asked for ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxinfer import LLM, EngineClosedError, InvalidRequestError, SamplingParams
from mlxinfer.grammar import spec
from mlxinfer.grammar.compiler import CheckProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.ci

PROGRAM = Path(__file__).with_name("interrupting.py")
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.alike
@pytest.mark.parametrize(
    "every",
    [
        {"stats": 1, "stream": 9, "grammar": 8, "close": 2},
        pytest.param({"stream": 1, "grammar": 1, "close": 1}, marks=pytest.mark.slow),
    ],
)
def test_calls_interrupted_at_any_of_their_points_break_nothing(every: dict[str, int]) -> None:
    said = run("points", *(f"{call}={gap}" for call, gap in every.items()))
    assert [line.partition(":")[0] for line in said.splitlines()] == list(every)
    assert said.count("whole after interrupts at") == len(every)


def test_calls_interrupted_at_random_times_break_nothing() -> None:
    print(run("times", "40", str(time.time_ns() % 10**6)))


@pytest.mark.slow
def test_100_000_calls_interrupted_at_random_times_break_nothing() -> None:
    print(run("times", "100000", str(time.time_ns() % 10**6)))


@pytest.fixture
def checker() -> CheckProcess:
    checker = CheckProcess()
    checker.check(spec.regex("a"))
    return checker


def test_an_interrupted_check_leaves_no_verdict_for_the_next_grammar(checker: CheckProcess) -> None:
    process = checker._process
    os.kill(process.pid, signal.SIGSTOP)  # the verdict comes after the interrupt

    def press() -> None:
        wait_until(lambda: checker.num_jobs)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        checker.check(spec.regex("("))
    pressing.join()
    os.kill(process.pid, signal.SIGCONT)
    for pattern in ("[ab]c", "[cd]e"):
        checker.check(spec.regex(pattern))
        with pytest.raises(InvalidRequestError):
            checker.check(spec.regex("("))
    assert checker.num_started == 1
    checker.close()


ASKED: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(["A", "B"], ENDLESS),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hello"}], ENDLESS),
    "agenerate": lambda llm: asyncio.run(llm.agenerate("A", ENDLESS)),
}


@pytest.mark.parametrize("call", ASKED)
def test_an_answer_that_close_cuts_off_is_an_error(call: str) -> None:
    llm = LLM("demo-draft")

    def close_when_it_runs() -> None:
        wait_until(lambda: llm.stats()["running"])
        llm.close()

    closing = threading.Thread(target=close_when_it_runs)
    closing.start()
    with pytest.raises(EngineClosedError, match="was closed"):
        ASKED[call](llm)
    closing.join()
