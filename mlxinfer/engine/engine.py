"""The engine: the one thread that touches MLX, and how to talk to it. Knows no text, no HTTP."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

from ..config import EngineConfig
from ..core import FinishReason, Request, TokenEvent
from ..errors import EngineClosedError, MlxinferError, RequestFailedError
from ..models.decoder import Model
from .kernels import choose_on_this_machine
from .loop import Loop
from .process import await_end, claim_process, is_fork, require_process

Listener = Callable[[TokenEvent], None]
log = logging.getLogger("mlxinfer.engine")
T = TypeVar("T")


class Engine:
    """Runs many requests at once over one model: token ids in, TokenEvents out.

    Every method may be called from any thread. Listeners are called on the engine's thread: they
    hand the event on and return.

    Args:
        load: called once on the engine's thread; returns the model and how to run it.

    Raises:
        EngineClosedError: this process is a fork of one that has used MLX.
        whatever `load` raises.
    """

    def __init__(self, load: Callable[[], tuple[Model, EngineConfig]]) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._stopping = False
        self._pid = claim_process()
        self._gate = threading.Lock()
        self._ended = threading.Event()  # the thread has left MLX
        ready: Future[Loop] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(load, ready), name="mlxinfer-engine", daemon=True
        )
        try:
            self._thread.start()
            self._loop = ready.result()
        except BaseException:  # Ctrl-C: nobody is left who could close what is being loaded
            self.close()
            raise

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; events come until one has a finish_reason.

        Raises:
            InvalidRequestError, ContextLengthError, InsufficientMemoryError: it can never run.
            EngineClosedError: the engine was closed.
        """
        with self._while_open():
            max_output = self._loop.check(request)
            request.arrived_s = time.monotonic()
            self._inbox.put(lambda: self._add(request, max_output, listener))

    def abort(self, request_id: str) -> None:
        """End a request if it has not ended; its last event says FinishReason.ABORT."""
        self._inbox.put(lambda: self._abort(request_id))

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what was done and what is held.

        Raises:
            EngineClosedError: the engine was closed.
        """
        return self.call(self._loop.stats)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result.

        Raises:
            EngineClosedError: the engine was closed, or is before the function's turn comes.
            whatever the function raises.
        """
        future: Future[T] = Future()

        def work() -> None:
            if self._stopping:
                future.set_exception(EngineClosedError("The engine was closed."))
                return
            try:
                future.set_result(function())
            except BaseException as error:  # it belongs to the caller, who gets it
                future.set_exception(error)

        with self._while_open():
            self._inbox.put(work)
        return future.result()

    def close(self) -> None:
        """Abort what runs, stop the thread and free the memory. Closing twice is fine."""
        if is_fork(self._pid):  # the thread is not here, and a lock may be held for ever
            return
        with self._gate:
            self._stopping = True
        self._inbox.put(lambda: None)
        began = self._thread.ident is not None  # else there was no thread to be had
        if began and threading.current_thread() is not self._thread:
            await_end(self._ended)
            self._thread.join()

    def require_process(self) -> None:
        """Raise EngineClosedError in a fork of the engine's process, where nothing comes."""
        require_process(self._pid)

    @property
    def closed(self) -> bool:
        """Whether close() was called, or a fault left nothing to go on with."""
        return self._stopping

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """What is put into the inbox meanwhile is answered."""
        self.require_process()
        with self._gate:
            if self._stopping:
                raise EngineClosedError("The engine is closed; build a new LLM.")
            yield

    # -- on the engine's thread -----------------------------------------------------------------

    def _work(self, load: Callable[[], tuple[Model, EngineConfig]], ready: "Future[Loop]") -> None:
        try:
            self._run(load, ready)
        finally:
            self._ended.set()

    def _run(self, load: Callable[[], tuple[Model, EngineConfig]], ready: "Future[Loop]") -> None:
        try:
            model, config = load()
            loop = Loop(model, config, self._emit, kernels=choose_on_this_machine())
        except BaseException as error:  # the constructor raises it in its caller
            ready.set_exception(error)
            return
        self._loop = loop
        ready.set_result(loop)
        del model, ready
        sound = True
        while not self._stopping:
            try:
                self._drain_inbox(block=loop.idle)
                loop.turn()
            except BaseException as error:  # a fault of ours, or a panic of a library
                sound = self._start_afresh(loop, error)
        self._finish(loop, sound)

    def _start_afresh(self, loop: Loop, error: BaseException) -> bool:
        """Fail all requests and go on; where not even that works (False), the engine ends."""
        try:
            loop.fail_all(error)
            what = f"{type(error).__name__}: {error}"
            self._fail_rest(RequestFailedError(f"A fault came before its end: {what}"), error)
            return True
        except BaseException as worse:  # say, no memory for a new cache
            with self._gate:
                self._stopping = True
            self._fail_rest(
                EngineClosedError(f"The engine has ended after a fault: {worse}"), worse
            )
            return False

    def _fail_rest(self, failure: MlxinferError, cause: BaseException) -> None:
        """End all who still listen: those too that the loop had ended, and nobody had told."""
        failure.__cause__ = cause
        error = FinishReason.ERROR
        self._emit([TokenEvent.without_token(i, error, error=failure) for i in self._listeners])

    def _finish(self, loop: Loop, sound: bool) -> None:
        """Answer what is left in the inbox, end what runs, and let go of the arrays."""
        while not self._inbox.empty():
            sound &= self._survives(lambda: self._drain_inbox(block=False))
        if sound:  # else all were told already
            sound = self._survives(loop.abort_all)
        loop.close(save=sound)
        mx.clear_cache()

    def _survives(self, last_work: Callable[[], None]) -> bool:
        """Whether it went well; else whoever still listens is told that nothing will come."""
        try:
            last_work()
        except BaseException as error:
            self._fail_rest(
                EngineClosedError(f"The engine was closed, and a fault came: {error}"), error
            )
            return False
        return True

    def _drain_inbox(self, *, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            message()
            block = False

    def _add(self, request: Request, max_output: int, listener: Listener) -> None:
        self._listeners[request.id] = listener
        if self._stopping:
            self._emit([TokenEvent.without_token(request.id, FinishReason.ABORT)])
            return
        self._loop.add(request, max_output)

    def _abort(self, request_id: str) -> None:
        if request_id in self._listeners:  # else it has had its last event, whatever the loop knows
            self._loop.abort(request_id)

    def _emit(self, events: list[TokenEvent]) -> None:
        listeners = self._listeners
        for event in events:
            try:
                listener = listeners[event.request_id]
                if event.finish_reason is not None:
                    del listeners[event.request_id]
                listener(event)
            except BaseException as error:  # it ends this request alone; the others hear theirs
                self._drop(event.request_id, error)

    def _drop(self, request_id: str, error: BaseException) -> None:
        """End a request whose listener does not take its events."""
        log.error("nobody hears request %s any more, it ends", request_id, exc_info=error)
        if request_id in self._listeners:
            self._listeners[request_id] = _deaf
            self.abort(request_id)


def _deaf(event: TokenEvent) -> None:
    """Listens for a request that nobody hears."""
