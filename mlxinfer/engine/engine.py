"""The loop: token ids in, TokenEvents out, on the one thread that touches MLX. Knows no text, no HTTP."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import TypeVar

import mlx.core as mx
import numpy as np

from ..cache.kv import KVCache
from ..config import EngineConfig
from ..core import FinishReason, Request, TokenEvent, check_token_ids
from ..errors import (
    ContextLengthError,
    EngineClosedError,
    InsufficientMemoryError,
    InvalidRequestError,
    RequestFailedError,
)
from ..models.decoder import Model
from ..sampling.sampler import Sampler
from .batch import Batch
from .runner import Launched, Runner
from .scheduler import Scheduler
from .sequence import Sequence

Listener = Callable[[TokenEvent], None]
T = TypeVar("T")


class Engine:
    """Runs many requests at once over one model.

    Every public method may be called from any thread. Listeners are called on the engine's thread:
    they hand the event on and return.

    Args:
        load: called once on the engine's thread; returns the model and how to run it.

    Raises:
        whatever `load` raises.
    """

    def __init__(self, load: Callable[[], tuple[Model, EngineConfig]]) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._stopping = False
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(load,), name="mlxinfer-engine", daemon=True
        )
        self._thread.start()
        self._ready.result()

    # -- called from any thread -----------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; events come until one has a finish_reason.

        Raises:
            InvalidRequestError, ContextLengthError, InsufficientMemoryError: it can never run.
            EngineClosedError: the engine was closed.
        """
        max_output = self._check(request)
        if self._stopping:
            raise EngineClosedError("The engine is closed; build a new LLM.")
        request.arrived_s = time.monotonic()
        self._inbox.put(lambda: self._add(request, max_output, listener))

    def abort(self, request_id: str) -> None:
        """End a request if it has not ended; its last event says FinishReason.ABORT."""
        self._inbox.put(lambda: self._abort(request_id))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result."""
        if self._stopping or threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # it belongs to the caller, who gets it
                future.set_exception(error)

        self._inbox.put(work)
        return future.result()

    def close(self) -> None:
        """Abort what runs, stop the thread and free the memory. Closing twice is fine."""
        if not self._stopping:
            self._stopping = True
            self._inbox.put(self._abort_all)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stats(self) -> dict[str, object]:
        """Plain numbers of what was done and what is held; call it through `call`."""
        if self._stopping:
            raise EngineClosedError("The engine is closed.")
        groups = [
            {
                "window": group.window,
                "layers": len(group.layers),
                "pages": group.allocator.num_pages,
                "pages_held": group.allocator.num_held,
                "page_bytes": group.page_bytes,
            }
            for group in self.cache.groups
        ]
        return {
            **asdict(self.scheduler.counters),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "page_size": self.config.page_size,
            "groups": groups,
            "kv_bytes_held": self.cache.bytes_held,
            "kv_bytes_allocated": self.cache.bytes_allocated,
            "bytes_copied": self.cache.bytes_copied,
            "bytes_grown": self.cache.bytes_grown,
            "peak_memory_bytes": mx.get_peak_memory(),
            "active_memory_bytes": mx.get_active_memory(),
        }

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._stopping

    # -- the loop -------------------------------------------------------------------------------

    def _run(self, load: Callable[[], tuple[Model, EngineConfig]]) -> None:
        try:
            self.model, self.config = load()
            self._assemble()
        except BaseException as error:  # noqa: BLE001 - the constructor raises it in its caller
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        while not self._stopping:
            try:
                self._loop()
            except Exception as error:  # a fault of ours: fail what ran, start afresh, stay alive
                self._fail_all(error)
        self._abort_all()
        self._drop_arrays()

    def _assemble(self) -> None:
        """A fresh cache, scheduler and runner around the model."""
        config = self.config
        self.cache = KVCache(
            self.model.kv_specs,
            dtype=self.model.activation_dtype,
            page_size=config.page_size,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            budget_bytes=config.kv_budget_bytes,
            num_pages=config.num_pages,
        )
        self.scheduler = Scheduler(
            windows=[group.window for group in self.cache.groups],
            allocators=[group.allocator for group in self.cache.groups],
            page_size=config.page_size,
            max_batch=self.cache.max_batch,
            prefill_chunk=config.prefill_chunk,
        )
        self.runner = Runner(self.model, self.cache, Sampler(self.model.config.vocab_size))

    def _loop(self) -> None:
        previous: Launched | None = None
        while not self._stopping:
            self._drain_inbox(block=previous is None and self.scheduler.idle)
            batch = self.scheduler.next_batch()
            current = self._launch(batch, previous) if batch else None
            if previous is not None and not self._commit(previous):
                current = None  # it ran on what the failed step left
            previous = current
            if previous is not None and not self.config.launch_ahead:
                self._commit(previous)
                previous = None

    def _drain_inbox(self, *, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            message()
            block = False

    def _launch(self, batch: Batch, previous: Launched | None) -> Launched | None:
        for sequence in batch.admitted:
            sequence.request.started_s = sequence.request.started_s or time.monotonic()
        try:
            return self.runner.launch(batch, previous)
        except Exception as error:  # the fault boundary of a step: its requests fail, others go on
            if previous is None or self._commit(previous):
                self._fail_step(batch, error)
            return None

    def _commit(self, launched: Launched) -> bool:
        """Read a step's tokens and pass them on; False: the step failed."""
        if launched.committed:
            return True
        launched.committed = True
        try:
            token_ids = launched.token_ids()
            logprobs = launched.logprobs()
            prompt_logits = [(s, np.array(logits)) for s, logits in launched.prompt_logits]
        except Exception as error:  # evaluation failed: the fault boundary of a step
            self._fail_step(launched.batch, error)
            return False
        for sequence, logits in prompt_logits:
            self._emit(TokenEvent(sequence.request.id, None, prompt_logits=logits))
        asked = {launched.batch.sampling[row]: found for row, found in logprobs.items()}
        taken = self.scheduler.commit(launched.batch, token_ids)
        self.runner.observe([s for s, _, _ in taken], [token for _, token, _ in taken])
        for sequence, token_id, reason in taken:
            self._emit(TokenEvent(sequence.request.id, token_id, reason, asked.get(sequence)))
        return True

    def _emit(self, event: TokenEvent) -> None:
        listener = self._listeners.get(event.request_id)
        if listener is None:
            return
        if event.finish_reason is not None:
            del self._listeners[event.request_id]
        listener(event)

    # -- requests -------------------------------------------------------------------------------

    def _check(self, request: Request) -> int:
        """How many tokens the answer may have, for a request that can run."""
        vocab_size = self.model.config.vocab_size
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequestError("The prompt is empty; give at least one token.", param="prompt")
        check_token_ids(request.prompt_ids, vocab_size, param="prompt")
        request.params.check_vocabulary(vocab_size)
        room = self.config.max_context - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens, and the context holds {self.config.max_context} "
                "with the answer; shorten the prompt.",
                param="prompt",
            )
        self._check_memory(num_prompt)
        max_tokens = request.params.max_tokens or room
        return min(max_tokens, room, self.cache.max_tokens - num_prompt)

    def _check_memory(self, num_prompt: int) -> None:
        for index, group in enumerate(self.cache.groups):
            needed = self.scheduler.pages_needed(index, num_prompt + 1)
            if needed > group.allocator.num_pages:
                raise InsufficientMemoryError(
                    f"The prompt has {num_prompt} tokens and needs {needed} pages of KV cache "
                    f"({needed * group.page_bytes / 1e6:.1f} MB), and there are only "
                    f"{group.allocator.num_pages}; shorten it or raise max_memory.",
                    param="prompt",
                )

    def _add(self, request: Request, max_output: int, listener: Listener) -> None:
        if self._stopping:
            listener(TokenEvent(request.id, None, FinishReason.ABORT))
            return
        self._listeners[request.id] = listener
        self.scheduler.add(request, max_output=max_output)

    def _abort(self, request_id: str) -> None:
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self.scheduler.finish(sequence)
            self._emit(TokenEvent(request_id, None, FinishReason.ABORT))

    def _abort_all(self) -> None:
        for sequence in self.scheduler.unfinished():
            self._abort(sequence.request.id)

    # -- faults ---------------------------------------------------------------------------------

    def _fail_step(self, batch: Batch, error: Exception) -> None:
        """Fail the requests of a step; the others start over on fresh arrays and lose nothing."""
        for segment in batch.segments:
            if not segment.sequence.finished:
                self._fail(segment.sequence, error)
        for sequence in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(sequence)
        for sequence in self.scheduler.unfinished():
            sequence.num_pending = 0  # sampled on what failed; drawn again, the same
        self.cache.reset()

    def _fail_all(self, error: Exception) -> None:
        for sequence in self.scheduler.unfinished():
            self._emit(_failure(sequence, error))
        self._assemble()

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self.scheduler.finish(sequence)
        self._emit(_failure(sequence, error))

    def _drop_arrays(self) -> None:
        del self.model, self.cache, self.runner
        mx.clear_cache()


def _failure(sequence: Sequence, error: Exception) -> TokenEvent:
    failure = RequestFailedError(
        f"A step of this request failed after {sequence.num_known - sequence.num_prompt} tokens: "
        f"{type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return TokenEvent(sequence.request.id, None, FinishReason.ERROR, error=failure)
