"""Interrupts the calls of an LLM at any point, and looks whether it is still whole.

    python tests/interrupting.py points CALL=N ...   at every N-th point of each of these calls
    python tests/interrupting.py times N SEED      N calls, after times at random

A program of its own: KeyboardInterrupts belong to no test runner. It exits with 0, or says what
broke. A call that hangs ends it with the stacks of all threads.
"""

import asyncio
import contextlib
import faulthandler
import gc
import inspect
import itertools
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from mlxinfer import LLM, InvalidRequestError, SamplingParams

HANG_S = 60
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
QUESTION = [{"role": "user", "content": "Hello"}]
names = itertools.count()


class Victim:
    """An LLM and the calls that are interrupted."""

    def __init__(self) -> None:
        self.llm = LLM("demo-draft", max_batch=8)
        self.expected = self.llm.generate("A page", SHORT).token_ids
        self.calls: dict[str, Callable[[], object]] = {
            "stats": lambda: self.llm.stats(),
            "generate": lambda: self.llm.generate([5], SHORT),
            "batch": lambda: self.llm.generate([[i + 5] for i in range(16)], SHORT),
            "stop": lambda: self.llm.generate("A page", SamplingParams(stop="e")),
            "stream": self.stream,
            "chat": lambda: self.llm.chat(QUESTION, SHORT),
            "stream_chat": lambda: list(self.llm.stream_chat(QUESTION, SHORT)),
            "pin": lambda: self.llm.pin([7] * 20),
            "logits": lambda: self.llm.logits([5, 6, 7]),
            "grammar": self.grammar,
            "agenerate": lambda: asyncio.run(self.llm.agenerate([5], SHORT)),
            "achat": lambda: asyncio.run(self.llm.achat(QUESTION, SHORT)),
            "close": lambda: self.llm.close(),
            "open": lambda: LLM("demo-draft", max_batch=8),
        }
        for name, call in self.calls.items():  # what they import is there from now on
            if name not in ("close", "open"):
                call()

    def stream(self) -> None:
        """Leave a stream that would go on for long."""
        for number, _ in enumerate(self.llm.stream("A", ENDLESS)):
            if number == 3:
                break

    def grammar(self) -> None:
        """Compile a grammar that no call has compiled before."""
        form = {"type": "regex", "regex": f"[ab]{next(names)}"}
        self.llm.generate("A", SHORT, response_format=form)

    def check(self, name: str) -> None:
        """All that was asked for has ended, and what is asked now is answered rightly."""
        if name == "close":
            self.llm.close()
            self.llm = LLM("demo-draft", max_batch=8)
        gc.collect(0)
        until_s = time.monotonic() + HANG_S
        while (stats := self.llm.stats())["running"] or stats["waiting"]:
            assert time.monotonic() < until_s, "an interrupted request goes on"
            time.sleep(0.0005)
        assert stats["step_failures"] == 0

    def check_well(self) -> None:
        """The same, and answers are what they were."""
        assert self.llm.generate("A page", SHORT).token_ids == self.expected
        for pattern, sound in ((f"[cd]{next(names)}", True), (f"({next(names)}", False)):
            form = {"type": "regex", "regex": pattern}
            try:
                self.llm.generate("A", SHORT, response_format=form)
                assert sound, f"the verdict on {pattern!r} is another grammar's"
            except InvalidRequestError:
                assert not sound, f"the verdict on {pattern!r} is another grammar's"
        sys.last_value = None
        gc.collect()
        until_s = time.monotonic() + HANG_S
        while (count := num_engines()) > 1:
            assert time.monotonic() < until_s, f"{count} engines, and one model"
            time.sleep(0.01)


def num_engines() -> int:
    return sum(thread.name == "mlxinfer-engine" for thread in threading.enumerate())


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


# -- at every point -------------------------------------------------------------------------------


def interrupted_at(call: Callable[[], object], point: int) -> int:
    """Make a call, interrupt it at a point, counted from 1, and return the points that it passed.

    CPython looks for signals where a function begins and after a call of a C function; both are
    events of the profiler, and what its function raises goes on from there. Where a generator goes
    on is left out: the profiler cannot tell `close`, before which no signal is looked for.
    """
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        goes_on = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "c_return") and not goes_on:
            count += 1
            if count == point:
                raise KeyboardInterrupt

    try:
        sys.setprofile(profile)
        call()
    except KeyboardInterrupt as interrupt:
        sys.last_value = interrupt  # as a notebook does: its traceback holds what it came through
    finally:
        sys.setprofile(None)
    return count


def every_point(victim: Victim, every: Mapping[str, int]) -> None:
    for name, gap in every.items():
        with no_hang():
            count = interrupted_at(victim.calls[name], 0)
        victim.check(name)
        points = range(1, count + 1, gap)
        for point in points:
            with no_hang():
                interrupted_at(victim.calls[name], point)
                victim.check(name)
        with no_hang():
            victim.check_well()
        print(f"{name}: whole after interrupts at {len(points)} of {count} points", flush=True)


# -- at random times ------------------------------------------------------------------------------


def interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)  # whatever its handler is: asyncio has its own


def interrupted_after(call: Callable[[], object], seconds: float) -> None:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # CPython may hear a signal late, when another thread has seen it and cannot handle it.
            # Sending the signal 0, which does nothing, looks for those that wait.
            signal.pthread_kill(threading.get_ident(), 0)
    except (KeyboardInterrupt, asyncio.CancelledError) as interrupt:  # asyncio.run raises either
        sys.last_value = interrupt


def at_random(victim: Victim, count: int, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    signal.signal(signal.SIGALRM, interrupt)
    rare = {"close": 0.2, "open": 0.2, "grammar": 1}
    calls = list(victim.calls)
    usual_s = dict.fromkeys(calls, 0.005) | {"open": 0.15, "stats": 0.0003}
    for number in range(count):
        (name,) = chance.choices(calls, [rare.get(name, 4) for name in calls])
        after_s = chance.uniform(1e-5, usual_s[name])
        with no_hang():
            interrupted_after(victim.calls[name], after_s)
            victim.check(name)
            if number % 100 == 99:
                victim.check_well()
        if number % 5000 == 4999:
            print(f"{number + 1} interrupts", flush=True)
    print(f"whole after {count} interrupts", flush=True)


if __name__ == "__main__":
    sys.unraisablehook = lambda _: None  # an interrupt of a finaliser ends there
    logging.getLogger("asyncio").disabled = True  # it tells of what it was interrupted in
    victim = Victim()
    if sys.argv[1] == "points":
        given = (argument.partition("=") for argument in sys.argv[2:])
        every_point(victim, {name: int(gap) for name, _, gap in given})
    else:
        at_random(victim, int(sys.argv[2]), int(sys.argv[3]))
    victim.llm.close()
