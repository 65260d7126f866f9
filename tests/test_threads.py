"""Waiting callers: Ctrl-C ends a wait soon, whenever it comes."""

import _thread
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mlxinfer.threads import Reply, run_apart, take
from tests.seeds import seeded

LATEST_S = 5.0  # far above SIGNAL_CHECK_S, far below RELEASE_S
RELEASE_S = 20.0  # a wait that lost its signal ends
MAIN = threading.main_thread().ident
assert MAIN is not None


@pytest.fixture(autouse=True)
def one_thread_runs_until_it_blocks() -> Iterator[None]:
    """So the signal comes just as the main thread begins to block, where it is easily lost."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    yield
    sys.setswitchinterval(before)


def interrupted_after_s(wait: Callable[[threading.Event], object], delay_s: float) -> float:
    """Seconds until KeyboardInterrupt, of a SIGINT sent `delay_s` after a wait begins to block."""
    released = threading.Event()

    def press() -> None:
        until = time.perf_counter() + delay_s
        while time.perf_counter() < until:
            pass
        signal.pthread_kill(MAIN, signal.SIGINT)
        released.wait(RELEASE_S)
        released.set()

    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come at any of these lines
        _thread.start_new_thread(press, ())
        wait(released)
        raise AssertionError("the wait ended by itself")
    released.set()
    return time.perf_counter() - begin


def wait_for_a_queue(released: threading.Event) -> object:
    items: queue.SimpleQueue[None] = queue.SimpleQueue()
    _thread.start_new_thread(lambda: (released.wait(), items.put(None)), ())
    return take(items)


def wait_for_a_reply(released: threading.Event) -> object:
    reply: Reply[bool] = Reply()
    _thread.start_new_thread(lambda: reply.of(released.wait), ())
    return reply.wait()


def wait_for_a_call(released: threading.Event) -> object:
    return run_apart(released.wait, "test")


@pytest.mark.parametrize("wait", [wait_for_a_queue, wait_for_a_reply, wait_for_a_call])
def test_ctrl_c_soon_ends_a_wait(wait: Callable[[threading.Event], object]) -> None:
    rng = seeded()
    for _ in range(25):
        assert interrupted_after_s(wait, rng.uniform(0, 20e-6)) < LATEST_S
