"""Threads beside the event loop: a bounded pool for texts, and threads for work that may hang."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from ..errors import OverloadedError
from ..fair import NOBODY, FairQueue, Tenant

P = ParamSpec("P")
T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> "Future[T]":
    """Call a function in a daemon thread of its own; returns a future of its result or error.

    With `asyncio.to_thread` a stuck thread would keep the process from ending.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # so it cannot be cancelled

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # raised where the future is awaited
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def apart(function: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Run a function on a thread of its own; a future of the running event loop."""
    return asyncio.wrap_future(in_background(function, name))


class Workers:
    """Runs functions in threads. They limit their own time: a thread cannot be interrupted.

    Tenants share the threads: the next one goes to who had the least time of them. A tenant for
    which no thread works does not wait for the long work of others: one more thread is for that.

    Args:
        num_threads: that work at once, for one tenant.
        max_waiting: functions that may wait for a thread.
    """

    def __init__(self, num_threads: int, max_waiting: int = 256) -> None:
        self._pool = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="mlxinfer-text")
        self._num_threads = num_threads
        self._running: Counter[Tenant] = Counter()
        self._turns = FairQueue[asyncio.Future[None]](max_waiting)

    @property
    def num_pending(self) -> int:
        return self._running.total() + len(self._turns)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run_for(NOBODY, function, *args, **kwargs)

    async def run_for(
        self, tenant: Tenant, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function in a thread and return its result."""
        loop = asyncio.get_running_loop()
        if self._may_begin(tenant):
            self._running[tenant] += 1
        else:
            await self._turn(tenant, loop.create_future())
        began_s = time.monotonic()

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits any more
                loop.call_soon_threadsafe(self._ended, tenant, began_s)

        try:
            work = self._pool.submit(_guarded, partial(function, *args, **kwargs))
        except RuntimeError:  # the pool was shut down
            self._ended(tenant, began_s)
            raise
        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    async def _turn(self, tenant: Tenant, turn: asyncio.Future[None]) -> None:
        """Wait for a thread; raises OverloadedError where too many wait."""
        lost = self._turns.put(tenant, turn)
        if lost is not None and not lost.done():
            lost.set_exception(OverloadedError("Too many prompts wait to be read; try again soon."))
        try:
            await turn
        except asyncio.CancelledError:
            self._turns.remove(tenant, turn)
            if not turn.cancelled() and turn.exception() is None:  # it had got its thread
                self._release(tenant)
            raise

    def _may_begin(self, tenant: Tenant) -> bool:
        room = self._num_threads - self._running.total()
        return room > 0 or (room == 0 and not self._running[tenant])

    def _ended(self, tenant: Tenant, began_s: float) -> None:
        self._turns.shares.charge(tenant, time.monotonic() - began_s)
        self._release(tenant)

    def _release(self, tenant: Tenant) -> None:
        self._running[tenant] -= 1
        self._running += Counter()  # without tenants that have none
        while (taken := self._turns.take(self._may_begin)) is not None:
            if not taken[1].done():  # else it was cancelled just now
                self._running[taken[0]] += 1
                taken[1].set_result(None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        while (taken := self._turns.take()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                taken[1].cancel()


class PanicError(Exception):
    """Replaces the exception of a panic in Rust, which is no Exception and would end the server."""


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:  # only what is no Exception is wrapped
        raise
    except BaseException as panic:  # the fault boundary of a thread
        raise PanicError(f"{type(panic).__name__}: {panic}") from panic
