"""A rank other than 0: runs the steps that rank 0 sends, until the connection ends.

One thread reads the connection, and answers whether the process lives; the other owns MLX. When
rank 0 is gone the process ends at once, also out of a collective operation that waits for it.
"""

import contextlib
import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from ..config import EngineConfig, KVOptions
from ..engine.kernels import choose_on_this_machine
from ..engine.runner import Computed, Forward, cache_of
from ..errors import MlxinferError
from ..memory import total_memory_bytes
from ..models import load_share
from ..models.language import LanguageModel
from . import messages
from .adapters import OwnAdapters
from .control import Connection, connect
from .disk import OwnDisk
from .hosts import Place, require_free
from .join import FORM_S, JOIN_S, WAIT_S, hello_of, join_group
from .link import GroupLink
from .wire import Reader, StepMessage, WorkMessage, checksum, spill_of

END_S = 2.0
SILENCE_S = JOIN_S + 20.0  # without a word of rank 0, which says one every second but as it joins
Find = Callable[[str], Path]  # a model's name -> its folder on this machine
log = logging.getLogger("mlxinfer.ranks")


class _InFlight:
    """The last step that was launched."""

    def __init__(self, computed: Computed, arrays: list[mx.array]) -> None:
        self.num_rows = 0 if computed.logits is None else len(computed.logits)
        self._arrays = arrays

    def wait(self) -> None:
        """Return when it is done and MLX holds none of its inputs."""
        mx.eval(self._arrays)
        mx.synchronize()


class Follower:
    """One rank.

    Args:
        place: which, among which.
        connection: to rank 0.
        find: folders of models on this machine; None: those of rank 0.
        ended: ends the process, or makes another of it.
    """

    def __init__(
        self,
        place: Place,
        connection: Connection,
        find: Find | None,
        ended: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self._ended = ended
        self._place = place
        self._connection = connection
        self._disk = OwnDisk(place.rank)
        self._find = find
        self._orders, self._encode = messages.orders(), messages.replies().encode
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._link: GroupLink | None = None  # until all are there
        self._sums_tokens = True
        self._reader: Reader
        self._model: LanguageModel | None = None
        self._adapters: OwnAdapters | None = None
        self._forward: Forward | None = None
        self._in_flight: _InFlight | None = None

    def run(self) -> None:
        """Follow until the connection ends, which ends the process; with MPI this returns."""
        threading.Thread(target=self._read, name="mlxinfer-control", daemon=True).start()
        obey: dict[type, Callable[[Any], None]] = {
            messages.Form: self._form,
            messages.Load: self._load,
            messages.Assemble: self._assemble,
            StepMessage: self._step,
            messages.Commit: self._commit,
            messages.Reset: self._reset,
            messages.Release: self._release,
            messages.Resize: self._resize,
            WorkMessage: self._work,
            messages.DiskOpen: self._disk.open,
            messages.DiskFetch: self._fetch,
            messages.DiskSave: self._save,
            messages.AdapterCheck: lambda order: self._own_adapters.check(order),
            messages.AdapterPiece: lambda order: self._own_adapters.piece(order),
            messages.AdapterRemove: self._remove_adapter,
        }
        while True:
            message = self._inbox.get()
            if message is None:  # rank 0 has left, and nothing is under way
                if self._place.backend == "mpi":
                    if self._link is not None:
                        self._link.close()
                    return  # the process ends as others do, and MPI with it
                self._ended()
            try:
                obey[type(message)](message)
            except BaseException as error:  # rank 0 hears of it, and the group ends
                known = isinstance(error, RuntimeError | OSError)  # MLX's: a link is lost
                log.error("rank %d ends: %s", self._place.rank, error, exc_info=not known)
                with contextlib.suppress(OSError):  # it may have left already
                    self._say(messages.Failed(f"{type(error).__name__}: {error}"))
                    time.sleep(0.5)  # until rank 0 has read it
                self._ended()

    def _read(self) -> None:
        patience_s = WAIT_S + SILENCE_S  # all other ranks are awaited before rank 0 says a word
        try:
            while True:
                message = self._orders.decode(self._connection.receive_within(patience_s))
                patience_s = SILENCE_S
                if isinstance(message, messages.Ping):
                    self._say(messages.Pong())
                else:
                    self._inbox.put(message)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            log.info("rank 0 is gone: %s", error)
            self._inbox.put(None)
            time.sleep(END_S)  # after which it waits for a rank that is gone
            self._ended()

    def _say(self, reply: msgspec.Struct) -> None:
        with self._lock:
            self._connection.send(self._encode(reply))

    # -- on the thread that owns MLX ------------------------------------------------------------

    def _form(self, _: messages.Form) -> None:
        self._link = GroupLink(join_group(self._place), overlaps=self._place.overlaps)
        log.info("rank %d of %d has joined", self._place.rank, self._place.size)

    def _load(self, message: messages.Load) -> None:
        assert self._link is not None, "a group is formed before a model is loaded"
        rank, problem, reads = self._place.rank, None, list[int]()
        try:
            self._model = load_share(
                self._folder(message),
                rank,
                self._link,
                dtype=message.dtype,
                pipeline=message.pipeline,
                read=reads.append,
            )
        except (MlxinferError, OSError) as error:  # rank 0 says so, and may load another model
            log.error("rank %d cannot load %s: %s", rank, message.name, error)
            problem = str(error)
        if self._model is not None and problem is None:
            self._adapters = OwnAdapters(rank, message.number, self._model, self._say)
        self._sums_tokens = not message.pipeline
        num_bytes = 0 if self._model is None else self._model.num_bytes
        facts = num_bytes, sum(reads), total_memory_bytes()
        self._say(messages.Loaded(rank, message.number, problem, *facts))

    @property
    def _own_adapters(self) -> OwnAdapters:
        assert self._adapters is not None, "a model is loaded before its adapters are"
        return self._adapters

    def _folder(self, message: messages.Load) -> Path:
        """Where the checkpoint lies here; MlxinferError where it is another one."""
        folder = Path(message.folder) if self._find is None else self._find(message.name)
        if messages.digest_of(folder) != message.digest:
            raise MlxinferError(
                f"{folder} is not the checkpoint that rank 0 has; copy or download the same one."
            )
        return folder

    def _assemble(self, message: messages.Assemble) -> None:
        assert self._model is not None
        page_size, max_batch, chunk, budget, num_pages, *kv, taps = msgspec.structs.astuple(message)
        config = EngineConfig(
            page_size=page_size,
            max_batch=max_batch,
            prefill_chunk=chunk,
            max_context=self._model.config.max_context,
            kv_budget_bytes=budget,
            num_pages=num_pages,
            kv=KVOptions(
                bits=kv[0], window=kv[1], sinks=kv[2], plain_ends=kv[3], plain_windows=kv[4]
            ),
        )
        cache = cache_of(self._model, config, choose_on_this_machine())
        link = self._link if self._sums_tokens else None
        self._forward = Forward(self._model, cache, taps=taps, link=link)
        self._reader = Reader(page_size)
        self._in_flight = None
        self._say(messages.ready(cache))

    def _step(self, message: StepMessage) -> None:
        forward, before = self._forward, self._in_flight
        assert forward is not None
        step = self._reader.step(message, self._disk.take_held())
        self._extend(message.extents)
        if message.checked:
            self._say(messages.Checked(message.number, checksum(step)))
        self._disk.put(forward.prepare(step, before)[1])
        tokens = None if before is None else mx.zeros((before.num_rows,), mx.int32)
        computed = forward.run(step, tokens)
        logits = [] if computed.logits is None else [computed.logits]
        arrays = [*logits, *computed.prompt_logits, *computed.hidden, *computed.outputs]
        mx.async_eval(arrays)
        self._in_flight = _InFlight(computed, arrays)

    def _commit(self, message: messages.Commit) -> None:
        assert self._forward is not None
        self._forward.cache.commit(message.num_kept)

    def _reset(self, _: messages.Reset) -> None:
        assert self._forward is not None
        self._in_flight = None
        self._forward.cache.reset()
        self._disk.take_held()

    def _extend(self, extents: Sequence[int]) -> None:
        """Pages of each layer group that are handed out."""
        assert self._forward is not None
        for group, extent in zip(self._forward.cache.groups, extents, strict=True):
            group.allocator.extent = extent

    def _work(self, message: WorkMessage) -> None:
        assert self._forward is not None
        if self._in_flight is not None:
            self._in_flight.wait()
        work, cache = self._reader.work(message, self._disk.take_held()), self._forward.cache
        self._extend(message.extents)
        cache.make_room(work.num_slots)
        self._disk.put(cache.carry_out(work))

    def _fetch(self, message: messages.DiskFetch) -> None:
        assert self._forward is not None
        cache = self._forward.cache
        page_bytes = [group.page_bytes for group in cache.groups]
        page_bytes += [] if cache.state_group is None else [cache.state_group.num_bytes]
        self._say(self._disk.fetch(message, page_bytes))

    def _save(self, message: messages.DiskSave) -> None:
        assert self._forward is not None
        spills = [spill_of(part) for part in message.spills]
        self._disk.put(self._forward.cache.read_out(spills))
        self._say(self._disk.flush(message))

    def _resize(self, message: messages.Resize) -> None:
        assert self._forward is not None
        for group, count in zip(self._forward.cache.groups, message.num_pages, strict=True):
            group.allocator.resize(count)

    def _remove_adapter(self, message: messages.AdapterRemove) -> None:
        if self._adapters is not None:  # else its model went while it was being loaded
            self._adapters.remove(message)

    def _release(self, _: messages.Release) -> None:
        self._model = self._forward = self._in_flight = self._adapters = None
        self._disk.close(END_S)
        gc.collect()
        mx.clear_cache()


def follow(
    place: Place,
    secret: bytes,
    find: Find | None,
    *,
    wait_s: float = FORM_S,
    ended: Callable[[], None] = lambda: os._exit(0),
) -> None:
    """Be a rank of a group until it ends; then `ended` ends the process.

    Raises:
        RanksFailedError: rank 0 is not there within `wait_s` seconds or does not take this rank, or
            a port is taken.
    """
    require_free(place)
    connection = connect(place.control, secret, hello_of(place), time.monotonic() + wait_s)
    Follower(place, connection, find, ended).run()
