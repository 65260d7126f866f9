"""The loop of a pooling model, turn by turn: a pass over waiting rows, and the pass before is read.

A pass is a flat list of tokens of several rows, without padding. Rows keep nothing between passes.
A row that is longer than a pass is computed alone, some layers in each turn, so that other models
of the process get the GPU in between.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import FinishReason, TokenEvent
from ..errors import EngineClosedError, MlxinferError, RequestFailedError, gpu_stopped, require_gpu
from ..layers.step import Step
from ..models.encoder import SummedEmbeddings
from .model import PoolingModel
from .request import (
    MOST,
    MOST_ON_CPU,
    PassQueue,
    PassSizer,
    PoolingLimits,
    PoolingRequest,
    WaitingRow,
)
from .segments import Masks, RowGroup, row_groups, segment_cache

SLICE_S = 0.25  # that a pass may take: other models of the process wait as long for the GPU
MAX_CACHED_BYTES = 1 << 29  # of MLX's free buffers: passes differ in size, so they are many


@dataclass(slots=True, eq=False)
class Pass:
    """Rows that are computed together, and how far they are."""

    rows: Sequence[WaitingRow]
    groups: Sequence[RowGroup]
    step: Step
    x: mx.array  # (T, hidden) behind `num_layers` layers
    normed: mx.array | None = None  # of x by the norm of the next layer, where it is known
    num_layers: int = 0
    began_s: float = 0.0  # of the slice that was launched last
    share: float = 0.0  # of all layers, that this slice computes
    vectors: mx.array | None = None  # (N, dim) behind all layers

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])

    @property
    def output(self) -> mx.array:
        return self.x if self.vectors is None else self.vectors


COUNTERS = ("steps", "tokens_computed", "rows_computed", "step_failures", "longest_pass")


class PoolingLoop:
    """Many requests over one pooling model. All methods are called from one thread, which owns MLX.

    Args:
        emit: called with the events of requests: one each, with `pooled` or an error.
        max_context: tokens of a row.
        pass_tokens: tokens of a pass; None: as many as take SLICE_S.
    """

    idle_work = None  # no kernel is ever asked for
    post: Callable[[Callable[[], None]], None]  # of every loop; not used here

    def __init__(
        self,
        model: PoolingModel,
        emit: Callable[[list[TokenEvent]], None],
        *,
        max_context: int,
        pass_tokens: int | None = None,
    ) -> None:
        self.model = model
        entry = model.model.entry
        num_types = entry.num_read_types if isinstance(entry, SummedEmbeddings) else 0
        self.limits = PoolingLimits(model.model.config.vocab_size, max_context, num_types)
        self._counters = dict.fromkeys(COUNTERS, 0)  # since the loop began
        self._emit = emit
        self._pass_tokens = pass_tokens
        segment_caches(model, [])  # raises where a layer has none
        self._assemble()

    def _assemble(self) -> None:
        self._queue = PassQueue()
        most = MOST if mx.metal.is_available() else MOST_ON_CPU
        self._sizer = PassSizer(SLICE_S, self._pass_tokens, most)
        self._unfinished: dict[str, list[WaitingRow]] = {}  # rows of requests that have not ended
        self._in_flight: Pass | None = None
        self._begun: Pass | None = None  # a pass of a long row, with layers to go
        self._ended_s = 0.0  # when the pass that was read last had ended

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        waits = self._in_flight is not None or self._begun is not None
        return not waits and not self._queue.num_waiting

    def turn(self) -> None:
        """Launch the next pass, then read the one before it: Python works while MLX does."""
        previous, self._in_flight = self._in_flight, None
        current = self._launch()
        if previous is not None:
            self._read(previous)
        self._in_flight = current
        if mx.get_cache_memory() > MAX_CACHED_BYTES:
            mx.clear_cache()

    # -- requests -------------------------------------------------------------------------------

    def add(self, request: PoolingRequest, checked: None) -> None:
        """Queue a request that `limits.check` passed."""
        rows = [WaitingRow(request, index) for index in range(len(request.rows))]
        request.vectors = np.empty((len(rows), self.model.dim), np.float32)
        request.num_missing = len(rows)
        self._unfinished[request.id] = rows
        self._queue.add(rows)

    def abort(self, request_id: str) -> None:
        if self._forget(request_id):
            self._emit([TokenEvent.without_token(request_id, FinishReason.ABORT)])

    def abort_all(self) -> None:
        for request_id in list(self._unfinished):
            self.abort(request_id)

    def _forget(self, request_id: str) -> bool:
        rows = self._unfinished.pop(request_id, None)
        if rows is None:
            return False
        self._queue.discard(rows)
        return True

    # -- passes ---------------------------------------------------------------------------------

    def _launch(self) -> Pass | None:
        """Launch a pass, or the next slice of one; None: there is none, or it failed."""
        most, begun = self._sizer.num_tokens, self._begun
        self._begun = None
        if begun is None or not any(map(self._waits, begun.rows)):
            rows = self._queue.take(most)
            begun = self._begin(rows) if rows else None
        launched = None if begun is None else self._advance(begun, most)
        if launched is not None and launched.vectors is None:
            self._begun = begun
        return launched

    def _begin(self, rows: Sequence[WaitingRow]) -> Pass | None:
        """A pass over rows in the order of their lengths; None: it failed."""
        now_s = time.monotonic()
        for row in rows:
            row.request.started_s = row.request.started_s or now_s
        try:
            return self._made(rows)
        except BaseException as error:  # the fault boundary of a pass: others go on
            self._fail(rows, error)
            return None

    def _made(self, rows: Sequence[WaitingRow]) -> Pass:
        model = self.model.model
        groups = row_groups([row.num_tokens for row in rows])
        ids = np.concatenate([np.asarray(row.row.ids, np.int32) for row in rows])
        positions = np.concatenate([np.arange(row.num_tokens, dtype=np.int32) for row in rows])
        variants = [model.rope_variant(row.num_tokens) for row in rows]
        by_token = None
        if any(variants):
            by_token = np.repeat(variants, [row.num_tokens for row in rows]).astype(np.int32)
        caches = dict(zip(model.mixers, segment_caches(self.model, groups), strict=True))
        step = Step(mx.array(positions), caches, rope_variants=by_token)
        step.token_types = _token_types(rows)
        return Pass(rows, groups, step, model.enter(mx.array(ids), step))

    def _advance(self, computed: Pass, most: int) -> Pass | None:
        """Launch as many more layers as `most` tokens of all layers are worth; None: it failed."""
        layers = self.model.model.layers
        count = max(1, len(layers) * most // computed.num_tokens)
        stop = min(computed.num_layers + count, len(layers))
        computed.share = (stop - computed.num_layers) / max(len(layers), 1)
        computed.began_s = time.monotonic()
        try:
            for layer in layers[computed.num_layers : stop]:
                computed.x, computed.normed = layer(computed.x, computed.normed, computed.step)
            computed.num_layers = stop
            if stop == len(layers):
                hidden = self.model.model.norm(computed.x)
                skipped = [row.row.num_prompt for row in computed.rows]
                computed.vectors = self.model.pooler(hidden, computed.groups, skipped)
            mx.async_eval(computed.output)
        except BaseException as error:  # the fault boundary, as in _begin
            self._fail(computed.rows, error)
            return None
        self._counters["steps"] += 1
        longest = max(self._counters["longest_pass"], computed.num_tokens)
        self._counters["longest_pass"] = longest
        return replace(computed)  # its next slice may be launched before this one is read

    def _read(self, computed: Pass) -> None:
        is_whole = computed.vectors is not None
        try:
            mx.eval(computed.output)
            vectors = np.array(computed.vectors) if is_whole else None
        except BaseException as error:  # evaluation failed
            self._fail(computed.rows, error)
            if self._begun is not None and self._begun.rows is computed.rows:
                self._begun = None
            return
        now_s = time.monotonic()
        seconds = now_s - max(computed.began_s, self._ended_s)  # one runs after the other
        self._ended_s = now_s
        self._sizer.observe(max(computed.num_tokens * computed.share, 1.0), seconds)
        if vectors is not None:
            self._counters["tokens_computed"] += computed.num_tokens
            self._counters["rows_computed"] += len(computed.rows)
            for row, vector in zip(computed.rows, vectors, strict=True):
                self._finish(row, vector)

    def _finish(self, row: WaitingRow, vector: NDArray[np.float32]) -> None:
        request = row.request
        if not self._waits(row):  # aborted meanwhile
            return
        if not np.isfinite(vector).all():
            self._fail_request(request.id, _not_finite(row.index))
            return
        request.vectors[row.index] = vector
        request.num_missing -= 1
        if not request.num_missing:
            del self._unfinished[request.id]
            reason, pooled = FinishReason.STOP, request.vectors
            self._emit([TokenEvent.without_token(request.id, reason, pooled=pooled)])

    # -- faults ---------------------------------------------------------------------------------

    def _fail(self, rows: Sequence[WaitingRow], error: BaseException) -> None:
        """Fail the requests of a pass; others lose nothing.

        If macOS stopped the pass on the GPU, its rows are computed again, once, in smaller passes.

        Raises:
            DeviceLostError: no later pass would run.
        """
        traceback.clear_frames(error.__traceback__)
        require_gpu(error)
        self._counters["step_failures"] += 1
        stopped, rows = gpu_stopped(error), [row for row in rows if self._waits(row)]
        if stopped:
            self._sizer.halve()
        for row in rows:
            if stopped and not row.retried:
                again = WaitingRow(row.request, row.index, retried=True)
                self._unfinished[row.request.id][row.index] = again
                self._queue.add([again])
            else:
                self._fail_request(row.request.id, _failed(error))

    def _waits(self, row: WaitingRow) -> bool:
        """Whether a request waits for what comes of this row; not if it is computed again."""
        rows = self._unfinished.get(row.request.id)
        return rows is not None and rows[row.index] is row

    def _fail_request(self, request_id: str, failure: MlxinferError) -> None:
        if self._forget(request_id):
            reason = FinishReason.ERROR
            self._emit([TokenEvent.without_token(request_id, reason, error=failure)])

    def fail_all(self, error: BaseException) -> None:
        """Fail every request and start afresh: the bookkeeping itself was wrong."""
        traceback.clear_frames(error.__traceback__)
        self._counters["step_failures"] += 1
        for request_id in list(self._unfinished):
            self._fail_request(request_id, _failed(error))
        if isinstance(error, EngineClosedError):  # the GPU is gone: no loop would work
            raise error
        self._assemble()

    def close(self, *, save: bool = True) -> None:
        del self.model, self._in_flight, self._begun

    def stats(self) -> dict[str, Any]:
        """Plain numbers, under the names of a model that generates; there is no KV cache."""
        running = sum(any(row.taken for row in rows) for rows in self._unfinished.values())
        return {
            **self._counters,
            "prompt_tokens_computed": self._counters["tokens_computed"],
            "pass_tokens": self._sizer.num_tokens,
            "running": running,
            "waiting": len(self._unfinished) - running,
            "waiting_rows": self._queue.num_waiting,
            **dict.fromkeys(("preemptions", "bytes_copied", "prompt_tokens_reused"), 0),
            "adapter_bytes": 0,
            **dict.fromkeys(("kv_bytes_held", "kv_bytes_cached", "kv_bytes_allocated"), 0),
            "groups": [],
            "peak_memory_bytes": mx.get_peak_memory(),
            "active_memory_bytes": mx.get_active_memory(),
        }


def segment_caches(model: PoolingModel, groups: Sequence[RowGroup]) -> list[Any]:
    masks = Masks(model.model.config.bidirectional)
    return [segment_cache(spec, groups, masks) for spec in model.model.cache_specs]


def _token_types(rows: Sequence[WaitingRow]) -> mx.array | None:
    """(T,) int32; None: all are 0."""
    if all(row.row.token_types is None for row in rows):
        return None
    types = [row.row.token_types or [0] * row.num_tokens for row in rows]
    return mx.array(np.concatenate([np.asarray(row_types, np.int32) for row_types in types]))


def _failed(error: BaseException) -> MlxinferError:
    if isinstance(error, EngineClosedError):
        return error
    failure = RequestFailedError(
        f"A pass over texts of this request failed: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def _not_finite(index: int) -> RequestFailedError:
    return RequestFailedError(
        f"The model's output for input {index} is NaN or infinite. Its weights may be damaged "
        "(download it again), or its numbers too large for float16 (try dtype='float32')."
    )
