"""The state that all requests of a server share: models, threads, readiness. No API.

Readiness is proved by a token or by finished steps, never by a flag. Otherwise a load balancer
could not see a process that lives while its engine hangs. An idle engine has to generate one token;
a working one has to finish steps.
"""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..errors import EngineClosedError, MlxinferError
from ..session.saved import NamedSessions
from . import pdf
from .admission import Admission
from .config import ServerConfig
from .errors import ShuttingDownError
from .log import RecentProblems
from .metrics import EngineStats, KeyMetrics, RequestMetrics, ServerMetrics
from .models import ModelRegistry
from .reuse import ReuseRecords
from .slots import RegistryEntry, ServedModel
from .store import ResponseStore
from .workers import Workers

PROGRESS_STEPS = 3  # two steps may be in flight at the first look: the third was launched after it
POLL_S = 0.02
FRESH_S = 1.0  # that an answer is reused: frequent probes cost nothing
log = logging.getLogger("mlxinfer.server")


class Health(StrEnum):
    """Whether requests would be answered, and why not."""

    READY = "ready"
    LOADING = "loading"  # pinned and preloaded models
    DRAINING = "draining"  # the server is about to end
    STUCK = "stuck"  # an engine makes no progress
    FAILING = "failing"  # an engine ends requests with errors


class Readiness:
    """Checks the loaded models; loads none.

    Args:
        deadline_s: seconds in which a model must generate a token or finish steps.
    """

    def __init__(self, models: ModelRegistry, engine_stats: EngineStats, deadline_s: float) -> None:
        self._models = models
        self._engine_stats = engine_stats
        self._deadline_s = deadline_s
        self._running: asyncio.Task[Health] | None = None
        self._checked_s = 0.0

    async def check(self) -> Health:
        """Check all loaded models at once; concurrent callers share one check."""
        if not self._models.started:
            return Health.LOADING
        stale = self._running is None or (
            self._running.done() and time.monotonic() > self._checked_s + FRESH_S
        )
        if stale:
            self._running = asyncio.create_task(self._check_all())
        assert self._running is not None
        return await asyncio.shield(self._running)

    async def _check_all(self) -> Health:
        healths = await asyncio.gather(*(self._check(model) for model in self._models.running()))
        self._checked_s = time.monotonic()
        return next((health for health in healths if health is not Health.READY), Health.READY)

    async def _check(self, model: ServedModel) -> Health:
        health = Health.READY
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._progress(model)
        except TimeoutError:
            health = Health.STUCK
        except EngineClosedError:  # a model that was unloaded just now need not answer
            health = Health.FAILING if model in self._models.running() else Health.READY
        except MlxinferError:
            health = Health.FAILING
        if health is not Health.READY:
            log.error("model is %s", health, extra={"model": model.name})
        return health

    async def _progress(self, model: ServedModel) -> None:
        before = await self._engine_stats.of(model)
        idle = not _is_busy(before)
        work = model.session.canary() if idle else asyncio.sleep(2 * self._deadline_s)
        canary = asyncio.create_task(work)
        try:
            while not canary.done():
                await asyncio.wait({canary}, timeout=POLL_S)
                now = await self._engine_stats.of(model)
                steps = now["steps"] - before["steps"]  # negative: the engine was restarted
                if not 0 <= steps < PROGRESS_STEPS or not (idle or _is_busy(now)):
                    return
            canary.result()
        finally:
            canary.cancel()


def _is_busy(stats: dict[str, Any]) -> bool:
    return bool(stats["running"] or stats["waiting"])


# -- awake ----------------------------------------------------------------------------------------

AWAKE_S = 30.0  # without a request: one that follows at once starts no other process
# It ends by itself when this process ends, however that ends.
AWAKE_COMMAND = ("caffeinate", "-i", "-w", str(os.getpid())) if sys.platform == "darwin" else ()


class Awake:
    """Keeps a Mac awake while requests run; the screen may sleep. Lives on one event loop.

    Args:
        command: runs as long as the machine is to stay awake; empty: nothing is done.
        release_s: seconds from the last request until it is ended.
    """

    def __init__(self, command: Sequence[str], release_s: float = AWAKE_S) -> None:
        self._command, self._release_s = command, release_s
        self._process: subprocess.Popen[bytes] | None = None
        self._release: asyncio.TimerHandle | None = None
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holders += 1
        self._hold()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders and self._process is not None:
                loop = asyncio.get_running_loop()
                self._release = loop.call_later(self._release_s, self.close)

    def _hold(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None
        if not self._command or (self._process is not None and self._process.poll() is None):
            return
        null = subprocess.DEVNULL
        try:  # file descriptors of Python are not inherited, and this way no memory is copied
            self._process = subprocess.Popen(
                self._command, stdin=null, stdout=null, stderr=null, close_fds=False
            )
        except OSError as error:
            log.warning("the machine may sleep during requests: %s", error)
            self._command = ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


# -- all that is shared ---------------------------------------------------------------------------

GRAMMAR_WORKERS = 2  # threads that make prompts while one process tries grammars out
PICTURE_WORKERS = 2  # threads that wait for pictures, and make prompts with them
SESSION_WORKERS = 2  # threads that save, load and import sessions: gigabytes
PAGE_WORKERS = 4  # threads that read pages of the prefix cache for peers
ENDING_S = 2.0  # that interrupted calls get to say so

# a name -> its entry, downloaded; reports (bytes done, bytes in all)
Fetch = Callable[[str, Callable[[tuple[int, int]], None]], RegistryEntry]


@dataclass(slots=True, eq=False)
class ServerState:
    """Models, limits and running calls. Lives on one event loop."""

    models: ModelRegistry
    config: ServerConfig
    store: ResponseStore | None = None  # None: responses are not stored
    sessions: NamedSessions | None = None  # None: without a disk cache none are saved
    fetch: Fetch | None = None  # None: requests download no models
    draining: bool = False
    hurried: bool = False
    calls: set[Any] = field(default_factory=set)  # each a Call: they generate, or are about to
    admission: Admission = field(init=False)
    workers: Workers = field(init=False)
    long_workers: Workers = field(init=False)
    picture_workers: Workers = field(default_factory=lambda: Workers(PICTURE_WORKERS))
    pdf_workers: Workers = field(
        default_factory=lambda: Workers(pdf.PROCESSES - 1, max_waiting=pdf.MAX_WAITING)
    )
    grammar_workers: Workers = field(init=False)  # both wait for processes, and hold up no texts
    fetchers: Workers = field(init=False)  # of pictures: slow hosts hold up no texts
    session_workers: Workers = field(default_factory=lambda: Workers(SESSION_WORKERS))
    page_workers: Workers = field(default_factory=lambda: Workers(PAGE_WORKERS))
    request_metrics: dict[str, RequestMetrics] = field(init=False)  # by model name
    key_metrics: dict[str, KeyMetrics] = field(default_factory=dict)  # by name of the key
    engine_stats: EngineStats = field(default_factory=EngineStats)
    readiness: Readiness = field(init=False)
    problems: RecentProblems = field(default_factory=RecentProblems)
    reuse: ReuseRecords = field(default_factory=ReuseRecords)
    awake: Awake = field(init=False)

    def __post_init__(self) -> None:
        self.awake = Awake(AWAKE_COMMAND if self.config.keep_awake else ())
        self.admission = Admission(self.config.max_waiting, self.config.max_waiting_tokens)
        self.workers = Workers(self.config.text_workers)
        self.long_workers = Workers(self.config.long_text_workers)
        self.grammar_workers = Workers(GRAMMAR_WORKERS)
        self.fetchers = Workers(self.config.image_fetchers)
        self.request_metrics = {name: RequestMetrics() for name in self.models.names()}
        self.readiness = Readiness(self.models, self.engine_stats, self.config.ready_deadline_s)

    def add_model(self, entry: RegistryEntry) -> None:
        self.models.add(entry)
        self.request_metrics.setdefault(entry.name, RequestMetrics())  # it may have been here

    async def metrics(self) -> ServerMetrics:
        stats = await self.engine_stats.all(self.models)
        return ServerMetrics(
            self.models.slots(),
            self.request_metrics,
            self.key_metrics,
            stats,
            self.models.limit_bytes,
        )

    def hurry(self) -> None:
        """End running calls with an error at once, instead of waiting for them as `drain` does."""
        self.hurried = True

    def refuse(self) -> None:
        """Take no new requests from now on, and say so where readiness is asked for."""
        self.draining = True

    async def drain(self) -> None:
        """Refuse new requests; after `drain_s` end the running ones with an error."""
        self.draining = True
        until_s = time.monotonic() + self.config.drain_s
        while self.calls and not self.hurried and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        for call in list(self.calls):
            call.interrupt(ShuttingDownError("The server is shutting down."))
        until_s = time.monotonic() + ENDING_S
        while self.calls and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        self.awake.close()
        for workers in (
            *(self.workers, self.long_workers, self.picture_workers, self.pdf_workers),
            *(self.grammar_workers, self.fetchers, self.page_workers, self.session_workers),
        ):
            workers.close()
        self.models.close()
        if self.store is not None:
            self.store.close()
