"""The engine: the one thread that touches MLX, and how to talk to it. Knows no text, no HTTP.

Ctrl-C may interrupt callers at any point. So the data that they share with the engine's thread is
locked by C locks that `with` takes directly, and answers come by SimpleQueue (see threads.py).

MLX has threads and locks of its own. A forked process has these locks without the threads, so it
would wait for ever. A process that ends while a thread is inside MLX is aborted.
"""

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import time
import weakref
from _thread import LockType as Lock
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from ..config import EngineConfig
from ..core import FinishReason, TokenEvent
from ..errors import (
    DeviceLostError,
    EngineClosedError,
    MlxinferError,
    RequestFailedError,
    require_gpu,
)
from ..models.language import LanguageModel
from ..threads import Reply, start
from .followers import NO_FOLLOWERS, Followers
from .kernels import choose_on_this_machine
from .loop import Loop
from .proposals import Proposer

Listener = Callable[[TokenEvent], None]
Emit = Callable[[list[TokenEvent]], None]
Load = Callable[[], tuple[LanguageModel, EngineConfig, Proposer | None]]
log = logging.getLogger("mlxinfer.engine")
T = TypeVar("T")
FAIL_S = 2.0  # that a step may take to end after a failure elsewhere
IDLE_S = 1.0  # without a message, before kernels are checked
ADVICE = "start processes with multiprocessing's 'spawn' or 'forkserver', and build an LLM there"

_claimed: list[int] = []  # the process that first ran an engine; in a fork of it, still that one


class EngineLoop(Protocol):
    """The work of an engine's thread: `Loop` generates, `PoolingLoop` computes vectors.

    Attributes:
        post: lets a function run on that thread between two turns; the engine sets it.
    """

    post: Callable[[Callable[[], None]], None]

    @property
    def limits(self) -> Any:
        """A frozen value with `check(request)`, read and called by any thread.

        It is replaced when the limits of requests change.
        """

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, and unfinished requests only wait for pages of peers."""

    @property
    def idle_work(self) -> Callable[[], None] | None:
        """About a second of work for a time without requests; None: nothing is left to do."""

    def turn(self) -> None:
        """Do one piece of work."""

    def add(self, request: Any, checked: Any) -> None:
        """Queue a request, with what `limits.check` returned."""

    def abort(self, request_id: str) -> None:
        """End a request if it has not ended."""

    def abort_all(self) -> None:
        """End every request."""

    def fail_all(self, error: BaseException) -> None:
        """Fail every request and start afresh."""

    def close(self, *, save: bool = True) -> None:
        """Release the model and every array."""

    def stats(self) -> dict[str, Any]:
        """Plain numbers."""


MakeLoop = Callable[[Emit], EngineLoop]
Stop = Callable[[], None]


def generation(load: Load, followers: Followers = NO_FOLLOWERS) -> Callable[[Emit], Loop]:
    """A factory of the loop of a model that generates; the engine calls it on its own thread.

    Args:
        load: returns the model, how to run it, and the proposer of tokens that steps verify.
    """

    def make(emit: Emit) -> Loop:
        try:
            model, config, proposer = load()
            return Loop(
                model,
                config,
                emit,
                kernels=choose_on_this_machine(),
                kernels_when_idle=True,
                proposer=proposer,
                followers=followers,
            )
        except BaseException:  # there is no loop that would release them
            followers.release()
            raise

    return make


class Engine:
    """Runs many requests at once over one model: token ids in, TokenEvents out.

    Every method may be called from any thread. Listeners are called on the engine's thread: they
    hand the event on and return.

    Args:
        make_loop: called once on the engine's thread; loads the model. `generation` makes such.
        owner: the engine is closed when this object is collected, and when the process ends; None:
            only by `close`. It must not be reachable from `make_loop`.
        stop_loading: makes `make_loop` raise soon: Ctrl-C waits for its end.

    Raises:
        EngineClosedError: this process is a fork of one that has used MLX.
        whatever `make_loop` raises.
    """

    def __init__(
        self, make_loop: MakeLoop, *, owner: object | None = None, stop_loading: Stop = lambda: None
    ) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._stopping = False
        self._abandoned = False
        self._end = EngineClosedError("The engine is closed; build a new LLM.")  # what callers get
        self._pid = claim_process()
        self._gate = threading.Lock()  # what is put into the inbox under it is answered
        self._running = threading.Lock()  # held by the thread until it has left MLX
        self._loop: EngineLoop  # set on the engine's thread, which is ready then
        ready: Reply[None] = Reply()
        self._thread = threading.Thread(
            target=self._work, args=(make_loop, ready), name="mlxinfer-engine", daemon=True
        )
        if owner is not None:  # before there is a thread: Ctrl-C may come as soon as there is one
            weakref.finalize(owner, self.close)
        try:
            start(self._thread, ready.fail)
            ready.wait()
        except BaseException:  # Ctrl-C: no caller is left to close what is being loaded
            stop_loading()
            self.close()
            raise

    def submit(self, request: Any, listener: Listener) -> None:
        """Queue a `Request`, or a `PoolingRequest`, as the loop takes it.

        Events come until one has a finish_reason.

        Raises:
            InvalidRequestError, ContextLengthError, InsufficientMemoryError: it can never run.
            EngineClosedError: the engine was closed.
        """
        self.require_open()
        checked = self._loop.limits.check(request)
        request.arrived_s = time.monotonic()
        self._put(partial(self._add, request, checked, listener))

    def abort(self, request_id: str) -> None:
        self.aborter((request_id,))()

    def aborter(self, request_ids: Sequence[str]) -> Callable[[], None]:
        """A call that aborts these requests, for a caller that leaves before they end.

        It may be called before they are submitted, or more than once. It is C code down to the
        inbox, so no signal handler runs between its beginning and its effect.
        """
        return partial(self._inbox.put, lambda: self._abort(request_ids))

    @property
    def limits(self) -> Any:
        return self._loop.limits

    def stats(self) -> dict[str, Any]:
        """Plain numbers of the work done and of the memory held.

        Raises:
            EngineClosedError: the engine was closed.
        """
        stats: dict[str, Any] = self.call(lambda loop: loop.stats())
        return stats

    def call(self, function: Callable[[Any], T]) -> T:
        """Run a function of the loop on its thread, between two steps, and return its result.

        Raises:
            EngineClosedError: the engine was closed, or is before the function's turn comes.
            whatever the function raises.
        """
        reply: Reply[T] = Reply()

        def work() -> None:
            if self._stopping:
                reply.fail(EngineClosedError("The engine was closed."))
                return
            reply.of(lambda: function(self._loop))

        self._put(work)
        return reply.wait()

    def fail(self, error: BaseException) -> None:
        """End all requests with an error that came up elsewhere, and then the engine.

        The engine's thread does this between two steps. If it does not come out of MLX, this thread
        does it. Then the engine's thread is left where it is, and the process ends without it.
        """

        def fail() -> None:
            raise error

        self._inbox.put(fail)
        if threading.current_thread() is self._thread or self._has_left(FAIL_S):
            return
        self._abandoned = True
        with self._gate:
            self._stopping, self._end = True, EngineClosedError(str(error))
        self._fail_rest(self._end, error)
        with contextlib.suppress(BaseException):  # `fail`, for one
            self._drain_inbox(wait_s=0.0)
        with contextlib.suppress(BaseException):
            self._drain_inbox(wait_s=0.0)
        atexit.register(leave)

    def _has_left(self, timeout_s: float) -> bool:
        """Whether the engine's thread leaves MLX for good within some seconds."""
        left = self._running.acquire(timeout=timeout_s)
        if left:
            self._running.release()
        return left

    def change(self, begin: Callable[[Any], Generator[float]]) -> None:
        """Change the loop on its thread, piece by piece between steps: running requests go on.

        Args:
            begin: called with the loop; returns a generator. Each `next` does one piece and gives
                the seconds until the next piece may begin. If it is closed early, it undoes all.

        Raises:
            EngineClosedError: the engine was closed, or is meanwhile.
            whatever a piece raises.
        """
        pieces = self.call(begin)
        try:
            while (pause_s := self.call(lambda _: next(pieces, None))) is not None:
                time.sleep(pause_s)
        finally:  # also after Ctrl-C between two pieces
            self.call(lambda _: pieces.close())

    def close(self) -> None:
        """Abort what runs, stop the thread and free the memory. Closing twice is fine."""
        if os.getpid() != self._pid:  # the thread is not here, and a lock may be held for ever
            return
        if self._abandoned:  # the thread is stuck
            return
        with self._gate:
            self._stopping = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            await_end(self._running)
            if self._thread.ident is not None:  # it has been started
                self._thread.join()

    def require_process(self) -> None:
        """Raise EngineClosedError in a fork of the engine's process, which gets no events."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"The engine runs in the process that this one was forked from; {ADVICE}."
            )

    def require_open(self) -> None:
        """Raise EngineClosedError where the engine was closed, or runs in another process.

        DeviceLostError: it ended because the GPU takes no more work from this process.
        """
        self.require_process()
        if self._stopping:
            raise type(self._end)(str(self._end))

    @property
    def closed(self) -> bool:
        return self._stopping

    def _put(self, message: Callable[[], None]) -> None:
        """Queue a message that will be answered; raises as `require_open`."""
        self.require_process()  # in a fork the gate may be held for ever
        with self._gate:
            self.require_open()
            self._inbox.put(message)

    # -- on the engine's thread -----------------------------------------------------------------

    def _work(self, make_loop: MakeLoop, ready: Reply[None]) -> None:
        with self._gate:
            if self._stopping:  # the constructor was interrupted, and has closed the engine
                return
            self._running.acquire()  # from here on close() waits
        try:
            self._run(make_loop, ready)
        finally:
            self._running.release()

    def _run(self, make_loop: MakeLoop, ready: Reply[None]) -> None:
        try:
            loop = make_loop(self._emit)
            loop.post = self._inbox.put
            self._loop = loop
        except BaseException as error:  # the constructor raises it in its caller
            try:
                require_gpu(error)
                ready.fail(error)
            except DeviceLostError as lost:
                ready.fail(lost)
            else:  # also what this thread compiled: a process that ends meanwhile would abort
                mx.clear_streams()
            return
        ready.put(None)
        del ready, make_loop
        sound = True
        while not self._stopping:
            try:
                if loop.idle or not self._inbox.empty():
                    self._wait_for_work(loop)
                loop.turn()
            except BaseException as error:  # a fault of ours, or a panic of a library
                sound = self._start_afresh(loop, error)
        self._finish(loop, sound)

    def _start_afresh(self, loop: EngineLoop, error: BaseException) -> bool:
        """Fail all requests and go on. False: that failed too, and the engine ends."""
        try:
            loop.fail_all(error)
            what = f"{type(error).__name__}: {error}"
            self._fail_rest(RequestFailedError(f"A fault came before its end: {what}"), error)
            return True
        except BaseException as worse:  # say, no memory for a new cache
            kind = type(worse) if isinstance(worse, EngineClosedError) else EngineClosedError
            with self._gate:
                self._stopping = True
                self._end = kind(f"The engine has ended after a fault: {worse}")
            self._fail_rest(self._end, worse)
            return False

    def _fail_rest(self, failure: MlxinferError, cause: BaseException) -> None:
        """End every request that has a listener, as a fault may have lost last events."""
        failure.__cause__ = cause
        error = FinishReason.ERROR
        self._emit([TokenEvent.without_token(i, error, error=failure) for i in self._listeners])

    def _finish(self, loop: EngineLoop, sound: bool) -> None:
        """Answer the calls left in the inbox, end running requests, and release the arrays."""
        while not self._inbox.empty():
            sound &= self._survives(lambda: self._drain_inbox(wait_s=0.0))
        if sound:  # else every request has had its last event
            sound = self._survives(loop.abort_all)
        loop.close(save=sound)
        if sound:  # both wait for streams, with the GIL held: one may wait for a rank that is gone
            mx.clear_cache()
            mx.clear_streams()

    def _survives(self, last_work: Callable[[], object]) -> bool:
        """Do the last work of a closing engine. False: it failed, and all requests end so."""
        try:
            last_work()
        except BaseException as error:  # at the end a fault must not leave callers waiting
            self._fail_rest(
                EngineClosedError(f"The engine was closed, and a fault came: {error}"), error
            )
            return False
        return True

    def _wait_for_work(self, loop: EngineLoop) -> None:
        """Take in messages. While there is nothing to do, kernels are checked that steps asked for.

        A check takes a second or so, and a request that comes meanwhile waits. So a check begins
        only when nothing has come for a while.
        """
        while loop.idle and (work := loop.idle_work) is not None:
            if self._drain_inbox(wait_s=IDLE_S):
                return  # to close, perhaps
            work()
        self._drain_inbox(wait_s=None if loop.idle else 0.0)

    def _drain_inbox(self, *, wait_s: float | None) -> bool:
        """Take in all messages that callers sent; returns whether there were any.

        Args:
            wait_s: for the first one; None: until it comes.
        """
        came = False
        while wait_s != 0.0 or not self._inbox.empty():
            try:
                message = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                break
            message()
            came, wait_s = True, 0.0
        return came

    def _add(self, request: Any, checked: Any, listener: Listener) -> None:
        self._listeners[request.id] = listener
        if self._stopping:
            self._emit([TokenEvent.without_token(request.id, FinishReason.ABORT)])
            return
        self._loop.add(request, checked)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._listeners:  # else it has had its last event
                self._loop.abort(request_id)

    def _emit(self, events: list[TokenEvent]) -> None:
        listeners = self._listeners
        for event in events:
            try:
                listener = listeners[event.request_id]
                if event.finish_reason is not None:
                    del listeners[event.request_id]
                listener(event)
            except BaseException as error:  # it ends this request alone; the others get theirs
                self._drop(event.request_id, error)

    def _drop(self, request_id: str, error: BaseException) -> None:
        log.error("the listener of request %s failed, the request ends", request_id, exc_info=error)
        if request_id in self._listeners:
            self._listeners[request_id] = _ignore
            self.abort(request_id)


def _ignore(event: TokenEvent) -> None:
    """The listener of a request that is being ended because its own one failed."""


def claim_process() -> int:
    """The id of this process, which is about to use MLX.

    Raises:
        EngineClosedError: it was forked from one that did.
    """
    pid = os.getpid()
    if not _claimed:
        _claimed.append(pid)
    if pid not in _claimed:
        raise EngineClosedError(
            f"This process was forked from one that has used MLX, which does not live on here; "
            f"{ADVICE}."
        )
    return pid


def await_end(running: Lock) -> None:
    """Wait for a lock that a thread holds as long as it uses MLX.

    Ctrl-C ends this wait, and then the process waits when it ends. There another Ctrl-C ends it at
    once. The thread is not joined, because after an interrupted `join` Python 3.11 believes that
    the thread has ended.
    """
    try:
        with running:
            pass
    except KeyboardInterrupt:
        if not threading.main_thread().is_alive():  # that is how Python says that it ends
            os._exit(130)
        atexit.register(await_end, running)
        raise


def leave() -> None:
    """End a process with an engine stuck inside MLX; else it would wait for the engine."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if getattr(sys, "last_value", None) is None else 1)
