"""Rank 0's side of a group of ranks: forms it, sends steps, and notices when one fails.

A group fails as a whole, and for good, because MLX forms one group in the life of a process. Then
the sockets of its ring are shut, so that no collective operation waits any more. The engine's step
raises, and its requests end with the reason. The owner of the process starts it again.
"""

import atexit
import contextlib
import logging
import math
import queue
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..cache.inputs import CacheWork
from ..cache.kv import KVCache
from ..config import EngineConfig
from ..engine.followers import Followers, StepInputs
from ..errors import CheckpointError, InvalidRequestError, MlxinferError, RanksFailedError
from ..memory import default_kv_bytes
from ..models import load_share
from ..models.language import LanguageModel
from . import messages
from .adapters import OtherAdapters
from .disk import OtherDisks
from .hosts import LocalRanks, RankOptions, RankPlace, local_place, shared_secret
from .join import GroupLink, gather_others, join_group, shut_ring
from .wire import StepWriter, checksum

PING_S = 1.0
SILENCE_S = 20.0  # after which a rank that does not answer counts as lost
READY_S = 120.0  # that the others may take to make their caches
LOAD_S = 1800.0  # ... to load their parts
STEP_S = 60.0  # ... for one step
OfModel = messages.Loaded | messages.AdapterDone
log = logging.getLogger("mlxinfer.ranks")


class RankGroup(Followers):
    """The other ranks, as rank 0 sees them.

    Args:
        place: this process, as rank 0.
        local: ranks that this process starts itself; None: others do.
        step_s: seconds that a step may take.
        check: called several times a second while the others are awaited; may raise.

    Attributes:
        failure: why it failed; None: it has not.
        on_failure: is called with it, on a thread of the group, and then those of `when_failed`.

    Raises:
        RanksFailedError: some did not come.
    """

    def __init__(
        self,
        place: RankPlace,
        secret: bytes,
        *,
        local: LocalRanks | None = None,
        step_s: float = STEP_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self.failure: RanksFailedError | None = None
        self.on_failure: Callable[[RanksFailedError], None] = lambda error: None
        self.loaded: list[messages.Loaded] = []  # by the others, of the present model
        self._local = local
        self.adapters: OtherAdapters  # of the model that is loaded
        self.disks: OtherDisks
        self._pipeline = False
        self._num_loads = 0
        self._claimed: str | None = None  # the model that they run, or will
        self._step_s = step_s
        self._answers: dict[type, queue.SimpleQueue[Any]] = _no_answers()
        self._problems: dict[int, str] = {}  # by rank: why it cannot load its part
        self._lock = threading.Lock()  # of sending, and of what follows
        self._sums: dict[tuple[int, int], int] = {}  # checksums that others will say: rank, step
        self._sent_s: list[float] = []  # when the steps that were not read yet were sent
        self._answered_s = 0.0  # when something else was last waited for; inf: it is
        self._num_steps = self._num_rows = self._step_bytes = 0  # that were sent
        self._closed = False
        self._ranks = gather_others(place, secret, local, check)
        self._heard_s = dict.fromkeys(self._ranks, time.monotonic())
        self._watcher = threading.Thread(target=self._watch, name="mlxinfer-ranks", daemon=True)
        self._watcher.start()
        self._tell("form")
        try:
            self._group_link = GroupLink(join_group(place))
        except RuntimeError as error:
            raise self.fail(error) from error

    @property
    def link(self) -> GroupLink | None:
        """The link for tokens; None with pipeline stages, which give each other no tokens."""
        return None if self._pipeline else self._group_link

    @property
    def is_pipeline(self) -> bool:
        return self._pipeline

    @property
    def num_stages(self) -> int:
        """Ranks that can work on different steps at the same time; 1: all work on each step."""
        return self.place.size if self._pipeline else 1

    # -- models ---------------------------------------------------------------------------------

    def claim(self, name: str) -> None:
        """Take the ranks for one model, until `release`.

        Raises:
            InvalidRequestError: they have another.
        """
        with self._lock:
            if self._claimed is not None:
                raise InvalidRequestError(
                    f"The ranks of this process run {self._claimed}, and they run one model at a "
                    f"time; close that one before {name} is loaded, or start another process.",
                    param="ranks",
                )
            self._claimed = name

    def load(
        self,
        name: str,
        folder: Path,
        *,
        dtype: str,
        pipeline: bool = False,
        watch: Callable[[int, int], None] | None,
    ) -> LanguageModel:
        """Let every rank load its part; returns this rank's part.

        Raises:
            CheckpointError: one of the others could not.
            RanksFailedError: the group has failed.
            others: see `load_share`.
        """
        self._pipeline = pipeline
        self._num_loads += 1
        digest = messages.digest_of(folder)
        self._problems.clear()
        self._answers = _no_answers()  # what was left there is of a model that was given up
        self._tell("load", self._num_loads, name, str(folder), dtype, pipeline, digest)

        def watched(done: int, total: int) -> None:
            self._check_loading(name)
            if watch is not None:
                watch(done, total)

        try:
            model = load_share(
                folder, 0, self._group_link, dtype=dtype, pipeline=pipeline, watch=watched
            )
            self.loaded = self._await(messages.Loaded, LOAD_S)
            self._check_loading(name)
        except MlxinferError:  # the others are there for the next model
            self._tell("release")
            raise
        form = f"{'stages' if pipeline else 'parts'} of {self.place.size} ranks"
        others = messages.Others(
            len(self._ranks), self._tell, self._next_answer, self.fail, self._step_s
        )
        self.disks, self.adapters = OtherDisks(others, form), OtherAdapters(others)
        return model

    def _check_loading(self, name: str) -> None:
        """Raise CheckpointError if a rank has said that it cannot load its part."""
        for rank, problem in sorted(self._problems.items()):
            raise CheckpointError(f"Rank {rank} cannot load {name}: {problem}")

    def kv_bytes(
        self, room: Callable[[int], int], own_bytes: int, *, adapter_bytes: int = 0
    ) -> int:
        """Bytes that the KV cache of each rank may take, by the rank with the least room.

        Args:
            room: on this machine, beside given bytes of weights and the adapters of one rank.
            own_bytes: of this rank's weights, with those of a draft that it has alone.
        """
        others = [one.weights_bytes + adapter_bytes for one in self.loaded]
        if self._local is not None:  # all are on this machine
            return room(own_bytes + sum(others)) // self.place.size
        machines = [one.memory_bytes for one in self.loaded]
        return min(room(own_bytes), *map(default_kv_bytes, machines, others))

    def assembled(self, cache: KVCache, config: EngineConfig, taps: Sequence[int]) -> None:
        """Let every rank make a cache like this; `taps`: see `Forward`.

        Raises:
            RanksFailedError: the group has failed, or another's cache is different.
        """
        self._writer = StepWriter()
        self._sent_s.clear()
        self._groups = cache.groups
        sizes = config.page_size, config.max_batch, config.prefill_chunk
        self._tell(
            "assemble", *sizes, config.kv_budget_bytes, config.num_pages, config.kv, list(taps)
        )
        this = messages.ready(cache)
        others = self._await(messages.Ready, READY_S)
        if self._pipeline:  # layers differ, and so does what they take
            every = [this, *others]
            counts = [min(values) for values in zip(*[one.num_pages for one in every], strict=True)]
            costs = [max(values) for values in zip(*[one.page_bytes for one in every], strict=True)]
            cache.lower(
                min(one.max_batch for one in every),
                list(zip(counts, costs, strict=True)),
                min(one.max_snapshots for one in every),
            )
            return
        for ready in others:
            if ready != this:
                raise self.fail(RuntimeError(f"a rank has a cache of {ready}; expected {this}"))

    def release(self) -> None:
        with contextlib.suppress(RanksFailedError):
            self._tell("release")
        self._sent_s.clear()  # steps in flight are not read any more
        self._claimed = None

    def close(self) -> None:
        """End the others; nothing works afterwards."""
        self._closed = True
        for connection in self._ranks.values():
            connection.close()
        if self._local is not None:
            self._local.end()

    # -- steps ----------------------------------------------------------------------------------

    def send(self, step: StepInputs) -> None:
        """Let the others run a step too. Raises RanksFailedError: the group has failed."""
        message = self._writer.message(step, [g.allocator.extent for g in self._groups])
        if message.checked:
            value = checksum(step)
            self._sums |= {(rank, message.number): value for rank in self._ranks}
        self._sent_s.append(time.monotonic())
        self._num_steps += 1
        self._num_rows += len(step.metadata.positions)
        frame = messages.encode(message)
        self._step_bytes += len(frame) * len(self._ranks)
        self._send_frame(frame)

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """End the oldest step that was sent and not read; as `Forward.take_back`."""
        if self._sent_s:
            self._sent_s.pop(0)
        if num_kept:
            self._tell("commit", dict(num_kept))

    def carry_out(self, work: CacheWork) -> None:
        message = self._writer.work(work, [g.allocator.extent for g in self._groups])
        self._send_frame(messages.encode(message))

    def resize(self, num_pages: Sequence[int]) -> None:
        self._tell("resize", list(num_pages))

    def leave_out(self, kinds: Collection[str], faulty: str) -> None:
        self._tell("leave_out", list(kinds), faulty)

    def reset(self, error: BaseException) -> None:
        """Forget the contents of all caches, because a step failed by this error.

        Raises:
            RanksFailedError: MLX raised it, so that other ranks may wait for this one; or the group
                has failed.
        """
        if isinstance(error, RuntimeError):
            raise self.fail(error) from error
        self._sent_s.clear()
        self._tell("reset")

    def fail(self, error: BaseException) -> RanksFailedError:
        """Mark the group as failed; returns the error to raise."""
        with self._lock:
            if self.failure is not None:
                return self.failure
            self.failure = RanksFailedError(
                f"The ranks of this model failed: {error or type(error).__name__}. They are to be "
                "started again; ask again in a few seconds."
            )
        log.error("%s", self.failure)
        if self._local is not None:
            self._local.end()
        shut_ring(self.place.ring)
        for answers in self._answers.values():
            answers.put(None)
        return self.failure

    def stats(self) -> dict[str, Any]:
        return {
            "ranks": self.place.size,
            "steps": self._num_steps,
            "rows": self._num_rows,
            "bytes_sent": {**self._group_link.sent, "steps": self._step_bytes},
            "bytes_received": dict(self._group_link.received),
            "failed": None if self.failure is None else str(self.failure),
        }

    # -- others ---------------------------------------------------------------------------------

    def _tell(self, name: str, *arguments: object) -> None:
        """Let all others call a method, see `messages.Orders`."""
        self._send_frame(messages.encode(messages.Order(name, list(arguments))))

    def _send_frame(self, frame: bytes) -> None:
        try:
            with self._lock:
                if self.failure is None:
                    for connection in self._ranks.values():
                        connection.send(frame)
        except OSError as error:
            if not self._closed:
                raise self.fail(error) from error
        if self.failure is not None:
            raise self.failure

    def _await(self, kind: type, timeout_s: float) -> list[Any]:
        answers: list[Any] = []
        while len(answers) < len(self._ranks):
            answer = self._next_answer(kind, timeout_s)
            if answer is None:
                raise self.fail(TimeoutError(f"no {kind.__name__} in {timeout_s:g} s"))
            answers.append(answer)
        return answers

    def _next_answer(self, kind: type, timeout_s: float) -> Any:
        """The next message of another rank; None: none came.

        Raises:
            RanksFailedError: the group has failed.
        """
        answer, self._answered_s = None, math.inf
        try:
            answer = self._answers[kind].get(timeout=timeout_s)
        except queue.Empty:
            pass
        finally:  # an interrupt too: the clock of steps in flight goes on
            self._answered_s = time.monotonic()
        if self.failure is not None:
            raise self.failure
        return answer

    # -- on the watcher's thread ----------------------------------------------------------------

    def _watch(self) -> None:
        self._watch_ranks()
        if self.failure is not None and not self._closed:
            self.on_failure(self.failure)
            for call in _ends:
                call()

    def _watch_ranks(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._ranks.items():
                selector.register(connection.fileno(), selectors.EVENT_READ, rank)
            pinged_s = 0.0
            while not self._closed and self.failure is None:
                try:
                    for key, _ in selector.select(PING_S / 4):
                        self._hear(key.data)
                    now_s = time.monotonic()
                    if now_s > pinged_s + PING_S:
                        self._tell("ping")
                        pinged_s = now_s
                    self._check_time(now_s)
                except Exception as error:  # whatever it is: no one else hears the others
                    if not self._closed:
                        self.fail(error)
                    return

    def _hear(self, rank: int) -> None:
        try:
            reply = messages.REPLIES.decode(self._ranks[rank].receive())
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            if self._closed:
                return
            raise self.fail(RuntimeError(self._obituary(rank, error))) from error
        self._heard_s[rank] = time.monotonic()
        if isinstance(reply, messages.Failed):
            raise self.fail(RuntimeError(f"rank {rank} says: {reply.reason}"))
        if isinstance(reply, messages.Checked):
            if self._sums.pop((rank, reply.number), reply.value) != reply.value:
                raise self.fail(RuntimeError(f"rank {rank} disagrees about step {reply.number}"))
        elif isinstance(reply, OfModel) and reply.load != self._num_loads:
            pass  # of a model that was given up
        elif not isinstance(reply, messages.Pong):
            if isinstance(reply, messages.Loaded) and reply.problem is not None:
                self._problems[reply.rank] = reply.problem
            self._answers[type(reply)].put(reply)

    def _obituary(self, rank: int, error: BaseException) -> str:
        time.sleep(0.1)  # its process ends just now
        ended = self._local.ended() if self._local is not None else None
        return ended or f"rank {rank} is gone ({error})"

    def _check_time(self, now_s: float) -> None:
        silent = [rank for rank, heard_s in self._heard_s.items() if now_s > heard_s + SILENCE_S]
        if silent:
            raise self.fail(
                TimeoutError(f"rank {silent[0]} has not answered for {SILENCE_S:g} seconds")
            )
        sent_s = max(next(iter(self._sent_s), now_s), self._answered_s)
        if now_s > sent_s + self._step_s:
            raise self.fail(TimeoutError(f"a step has taken more than {self._step_s:g} seconds"))


def _no_answers() -> dict[type, queue.SimpleQueue[Any]]:
    kinds = (messages.Loaded, messages.Ready, messages.AdapterDone, messages.DiskDone)
    return {kind: queue.SimpleQueue() for kind in kinds}


_lock = threading.Lock()
_open: list[RankGroup] = []
_ends: list[Callable[[], None]] = []


def when_failed(call: Callable[[], None]) -> None:
    """Call this, on a thread of the group, once the group of this process has failed."""
    _ends.append(call)


def open_group(
    options: RankOptions, model: str | None = None, check: Callable[[], None] = lambda: None
) -> RankGroup | None:
    """The group of these options, formed if this process has none; None: one rank is asked for.

    This process must be rank 0 of it. A `model` that is named claims it, see `RankGroup.claim`.
    `check` is called several times a second while others are awaited, and may raise.

    Raises:
        InvalidRequestError: the options, or another group was formed before, or has a model.
        RanksFailedError: the group has failed before, or others did not come.
    """
    place = options.elsewhere
    if place is None and options.ranks == 1:
        return None
    group = _group_of(options, place, check)
    if model is not None:
        group.claim(model)
    return group


def _group_of(
    options: RankOptions, place: RankPlace | None, check: Callable[[], None]
) -> RankGroup:
    """The group of this process, formed if it has none. Raises what `open_group` raises."""
    size = options.ranks if place is None else place.size
    with _lock:
        if _open:
            (group,) = _open
            if group.failure is not None:
                raise RanksFailedError(
                    f"{group.failure} MLX forms one group in the life of a process: start a new "
                    "one."
                )
            if group.place.size != size:
                raise InvalidRequestError(
                    f"This process has formed a group of {group.place.size} ranks, and MLX forms "
                    "one in the life of a process; start another for a group of "
                    f"{size}.",
                    param="ranks",
                )
            return group
        if place is None:
            group = RankGroup(
                local_place(size),
                secrets.token_bytes(32),
                local=LocalRanks(),
                step_s=options.rank_deadline,
                check=check,
            )
        else:
            group = RankGroup(place, shared_secret(), step_s=options.rank_deadline, check=check)
        _open.append(group)
        atexit.register(group.close)
        return group
