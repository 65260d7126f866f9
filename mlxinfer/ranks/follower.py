"""A rank other than 0: runs the steps that rank 0 sends, until the connection ends.

One thread reads the connection, and answers that the process lives. The other thread owns MLX. When
rank 0 is gone the process ends at once, even if a collective operation waits for rank 0.
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

from ..cache.inputs import PageTransfer
from ..cache.paged import finish
from ..config import EngineConfig, KVOptions
from ..engine.kernels import Kernels, choose_on_this_machine
from ..engine.model_cache import cache_of
from ..engine.runner import Computed, Forward
from ..errors import MlxinferError
from ..memory import total_memory_bytes
from ..models import load_share
from ..models.language import LanguageModel
from ..threads import take
from . import messages
from .adapters import OwnAdapters
from .control import Connection, connect
from .disk import OwnDisk
from .hosts import RankPlace, require_free
from .join import FORM_S, JOIN_S, WAIT_S, GroupLink, hello_of, join_group
from .wire import StepMessage, StepReader, WorkMessage, checksum

END_S = 2.0
SILENCE_S = JOIN_S + 20.0  # without a word of rank 0, which says one every second but as it joins
Find = Callable[[str], Path]  # a model's name -> its folder on this machine
PING = messages.Order("ping", [])  # is answered by `Pong`, whatever else is being done
log = logging.getLogger("mlxinfer.ranks")


class _InFlight:
    def __init__(self, computed: Computed, arrays: list[mx.array]) -> None:
        self.num_rows = 0 if computed.logits is None else len(computed.logits)
        self._arrays = arrays

    def wait(self) -> None:
        finish(self._arrays)


class Follower:
    """One rank.

    Args:
        find: folders of models on this machine; None: those of rank 0.
        ended: ends the process, or makes another of it.
    """

    def __init__(
        self,
        place: RankPlace,
        connection: Connection,
        find: Find | None,
        ended: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self._ended = ended
        self._place = place
        self._connection = connection
        self._disk, self._adapters = OwnDisk(place.rank), OwnAdapters(place.rank, self._say)
        self._find = find
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._link: GroupLink | None = None  # until all are there
        self._sums_tokens = True
        self._reader: StepReader
        self._model: LanguageModel | None = None
        self._forward: Forward | None = None
        self._kernels: Kernels | None = None
        self._in_flight: _InFlight | None = None

    def run(self) -> None:
        """Follow until the connection ends, which ends the process."""
        threading.Thread(target=self._read, name="mlxinfer-control", daemon=True).start()
        orders = messages.Orders(
            form=self._form,
            load=self._load,
            assemble=self._assemble,
            commit=self._commit,  # types of arguments are read from the methods
            reset=self._reset,
            leave_out=self._leave_out,
            release=self._release,
            resize=self._resize,
            open_disk=self._disk.open,
            fetch=self._fetch,
            save=self._save,
            check_adapter=self._adapters.check,
            load_adapter_piece=self._adapters.piece,
            remove_adapter=self._adapters.remove,
        )
        obey: dict[type, Callable[[Any], None]] = {
            messages.Order: orders.obey,
            StepMessage: self._step,
            WorkMessage: self._work,
        }
        while True:
            message = take(self._inbox)
            if message is None:  # rank 0 has left, and nothing is under way
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
                message = messages.ORDERS.decode(self._connection.receive_within(patience_s))
                patience_s = SILENCE_S
                if message == PING:
                    self._say(messages.Pong())
                else:
                    self._inbox.put(message)
        except Exception as error:  # whatever it is: no order comes any more
            known = isinstance(error, OSError | EOFError | msgspec.MsgspecError)
            log.info("rank 0 is gone: %s", error, exc_info=not known)
            self._inbox.put(None)
            time.sleep(END_S)  # after which it waits for a rank that is gone
            self._ended()

    def _say(self, reply: msgspec.Struct) -> None:
        with self._lock:
            self._connection.send(messages.encode(reply))

    # -- on the thread that owns MLX ------------------------------------------------------------

    def _form(self) -> None:
        self._link = GroupLink(join_group(self._place))
        log.info("rank %d of %d has joined", self._place.rank, self._place.size)

    def _load(
        self, number: int, name: str, folder: str, dtype: str, pipeline: bool, digest: int
    ) -> None:
        """Load this rank's part of a model; `Loaded` answers.

        Args:
            folder: of the checkpoint on rank 0's machine.
            pipeline: whether ranks have layers, rather than parts of every layer.
            digest: of the checkpoint's files, see `digest_of`.
        """
        assert self._link is not None, "a group is formed before a model is loaded"
        rank, problem, reads = self._place.rank, None, list[int]()
        try:
            self._model = load_share(
                self._folder(name, folder, digest),
                rank,
                self._link,
                dtype=dtype,
                pipeline=pipeline,
                read=reads.append,
            )
        except (MlxinferError, OSError) as error:  # rank 0 says so, and may load another model
            log.error("rank %d cannot load %s: %s", rank, name, error)
            problem = str(error)
        if self._model is not None and problem is None:
            self._adapters.begin(number, self._model)
        self._sums_tokens = not pipeline
        num_bytes = 0 if self._model is None else self._model.num_bytes
        facts = num_bytes, sum(reads), total_memory_bytes()
        self._say(messages.Loaded(rank, number, problem, *facts))

    def _folder(self, name: str, stated: str, digest: int) -> Path:
        """The folder of the checkpoint here; raises MlxinferError if it is another checkpoint."""
        folder = Path(stated) if self._find is None else self._find(name)
        if messages.digest_of(folder) != digest:
            raise MlxinferError(
                f"{folder} is not the checkpoint that rank 0 has; copy or download the same one."
            )
        return folder

    def _assemble(
        self,
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        kv_budget_bytes: int,
        num_pages: int | None,
        kv: KVOptions,
        taps: list[int],
    ) -> None:
        """Make the KV cache of an `EngineConfig` of these fields; `Ready` answers.

        `taps` are the layers whose outputs rank 0 wants.
        """
        assert self._model is not None
        config = EngineConfig(
            page_size=page_size,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            max_context=self._model.config.max_context,
            kv_budget_bytes=kv_budget_bytes,
            num_pages=num_pages,
            kv=kv,
        )
        cache, self._kernels = cache_of(self._model, config, choose_on_this_machine())
        link = self._link if self._sums_tokens else None
        self._forward = Forward(self._model, cache, taps=taps, link=link)
        self._reader = StepReader(page_size)
        self._in_flight = None
        self._say(messages.ready(cache))

    @property
    def _running(self) -> Forward:
        assert self._forward is not None, "a cache is made before steps come"
        return self._forward

    def _step(self, message: StepMessage) -> None:
        forward, before = self._running, self._in_flight
        step = self._reader.step(message, self._disk.take_held())
        self._extend(message.extents)
        if message.checked:
            self._say(messages.Checked(message.number, checksum(step)))
        self._disk.put(forward.prepare(step, before))
        tokens = None if before is None else mx.zeros((before.num_rows,), mx.int32)
        computed = forward.run(step, tokens)
        logits = [] if computed.logits is None else [computed.logits]
        arrays = [*logits, *computed.prompt_logits, *computed.unsampled, *computed.outputs]
        mx.async_eval(arrays)
        self._in_flight = _InFlight(computed, arrays)

    def _commit(self, num_kept: dict[int, int]) -> None:
        """Keep some tokens of a step with proposals by slot, see `Forward.take_back`."""
        self._running.take_back(num_kept)

    def _reset(self) -> None:
        self._in_flight = None
        self._running.cache.reset()
        self._disk.take_held()

    def _leave_out(self, kinds: list[str], faulty: str) -> None:
        """Use plain MLX in place of these kinds of kernels, and for good of the faulty one."""
        assert self._kernels is not None
        if faulty:
            self._kernels.condemn(faulty)
        self._kernels.leave_out(kinds)

    def _extend(self, extents: Sequence[int]) -> None:
        for group, extent in zip(self._running.cache.groups, extents, strict=True):
            group.allocator.extent = extent

    def _work(self, message: WorkMessage) -> None:
        if self._in_flight is not None:
            self._in_flight.wait()
        work, cache = self._reader.work(message, self._disk.take_held()), self._running.cache
        self._extend(message.extents)
        cache.make_room(work.num_slots)
        self._disk.put(cache.carry_out(work))

    def _fetch(self, number: int, places: list[tuple[int, bytes]]) -> None:
        """Read (group, key) for the next step; `DiskDone` answers this order's number."""
        cache = self._running.cache
        page_bytes = [group.page_bytes for group in cache.groups]
        page_bytes += [] if cache.state_group is None else [cache.state_group.num_bytes]
        self._say(messages.DiskDone(number, self._disk.fetch(places, page_bytes)))

    def _save(self, number: int, spills: list[PageTransfer], timeout_s: float) -> None:
        """Store pages, and wait for the writes; `DiskDone` answers this order's number."""
        self._disk.put(self._running.cache.read_out(spills))
        self._say(messages.DiskDone(number, [] if self._disk.flush(timeout_s) else [0]))

    def _resize(self, num_pages: list[int]) -> None:
        for group, count in zip(self._running.cache.groups, num_pages, strict=True):
            group.allocator.resize(count)

    def _release(self) -> None:
        """Forget the model and its cache; another may follow."""
        self._model = self._forward = self._in_flight = self._kernels = None
        self._adapters.end()
        self._disk.close(END_S)
        gc.collect()
        mx.clear_cache()


def follow(
    place: RankPlace,
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
