"""The models of a server by name: loaded on request, within a memory budget, unloaded when idle.

Loads and unloads run one after the other, off the event loop. So no two loads compete for the disk,
and the memory in use never exceeds its limit. Everything else lives on one event loop, so nothing
is locked.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import wait
from contextlib import asynccontextmanager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import (
    DeviceLostError,
    EngineClosedError,
    InvalidRequestError,
    MlxinferError,
    ModelNotFoundError,
    OverloadedError,
)
from ..memory import human_bytes
from .errors import HttpError, ModelLoadError
from .slots import BUSY_RETRY_S, ModelSlot, RegistryEntry, ServedModel, State, kv_budgets
from .workers import apart, in_background

UNLOAD_S = 60.0  # that a model may take to end; one that is stuck holds its memory
CLOSE_S = 30.0  # that all may take at the end of the server
POLL_S = 0.02
TEND_S = 0.5  # between two checks for idle models
log = logging.getLogger("mlxinfer.server")


class ModelRegistry:
    """Models by name. The first one answers requests that name none.

    Lives on one event loop, except `close`.

    Args:
        entries: at least one.
        limit_bytes: of weights and KV caches of all loaded models together.
        clock: monotonic seconds.
        default: answers requests that name no model, or one that is not here; None: the first one
            answers those, and these are a 404.

    Attributes:
        started: the pinned and preloaded models are loaded. Before that nothing is logged, and
            errors of loads are raised to the caller.

    Raises:
        InvalidRequestError: two have one name, one does not fit, or the default is not here.
    """

    def __init__(
        self,
        entries: Sequence[RegistryEntry],
        *,
        limit_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        default: str | None = None,
    ) -> None:
        assert entries
        self.limit_bytes = limit_bytes
        self.started = False
        self._clock = clock
        self._changing = asyncio.Lock()  # held during a load or an unload
        self._slots: list[ModelSlot] = []
        self._by_name: dict[str, ModelSlot] = {}
        slots = [ModelSlot(entry, 0, entry.weights_bytes, clock) for entry in entries]
        budgets = kv_budgets(slots, limit_bytes)
        for slot in slots:
            slot.kv_bytes = budgets.get(slot.entry.name, 0)
            self._append(slot)
        if default is not None and default not in self._by_name:
            raise InvalidRequestError(
                f"The default model {default!r} is none of {', '.join(self.names())}.",
                param="default_model",
            )
        self._default = None if default is None else self._by_name[default]

    # -- names ----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return [slot.entry.name for slot in self._slots]

    def slots(self) -> list[ModelSlot]:
        return list(self._slots)

    def running(self) -> list[ServedModel]:
        return [slot.served for slot in self._slots if slot.served is not None]

    @property
    def held_bytes(self) -> int:
        return sum(slot.held_bytes for slot in self._slots)

    def knows(self, name: str) -> bool:
        """Whether a model is called exactly so, or has this alias."""
        return name in self._by_name

    def find(self, name: str | None) -> ModelSlot:
        return self.resolve(name)[0]

    def resolve(self, name: str | None) -> tuple[ModelSlot, str | None]:
        """The model of a name, an alias or a pattern such as `claude-*`, or the default model.

        Without a name it is the default model, or the first one. The second value is an adapter:
        `model:adapter` names one, and so does an adapter's name alone if no other model has an
        adapter of that name.

        Raises:
            ModelNotFoundError: no model is called so. Requests never load by path.
        """
        if name is None:
            return self._default or self._slots[0], None
        slot = self._called(name)
        if slot is not None:
            return slot, None
        having = [slot for slot in self._slots if name in slot.adapters]
        if len(having) == 1:
            return having[0], name
        base, _, adapter = name.rpartition(":")
        slot = self._called(base)
        if slot is not None and adapter in slot.adapters:
            return slot, adapter
        if self._default is not None and slot is None:
            return self._default, None
        available = f"there is: {', '.join(self.names())}"
        if slot is not None:
            adapters = ", ".join(slot.adapters) or "none"
            available = f"the adapters of {slot.entry.name} are: {adapters}"
        raise ModelNotFoundError(f"There is no model {name[:100]!r} here; {available}.")

    def _called(self, name: str) -> ModelSlot | None:
        """The model of a name or an alias, or of the first alias with a `*` that matches."""
        if name in self._by_name:
            return self._by_name[name]
        patterns = (alias for alias in self._by_name if "*" in alias)
        return next((self._by_name[a] for a in patterns if fnmatchcase(name, a)), None)

    # -- use ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, slot: ModelSlot) -> AsyncIterator[ServedModel]:
        """The model of a slot, loaded if it is not, and kept until the block ends.

        Raises:
            DeviceLostError: no engine of this process works, and the server ends.
            ModelLoadError: it could not be loaded, or not lately.
            OverloadedError: the models in its way are in use, or it is being unloaded.
        """
        if slot.leaving:
            raise OverloadedError(
                f"The model {slot.entry.name} is being unloaded; try again.", retry_after_s=1.0
            )
        self._notice_end(slot)
        slot.users += 1
        try:
            yield slot.served if slot.served is not None else await self._loaded(slot)
        finally:
            slot.users -= 1
            slot.used_s = self._clock()

    async def _loaded(self, slot: ModelSlot) -> ServedModel:
        """Load a model once for all calls that wait; the load goes on if all of them leave."""
        if slot.loading is None:
            if left_s := slot.retry_left_s:
                raise slot.not_loaded(left_s)
            slot.loading = _task(self._bring_in(slot))
        return await asyncio.shield(slot.loading)

    async def load(self, name: str) -> None:
        slot = self.find(name)
        slot.failures_in_a_row = 0  # an explicit request tries it at once
        try:
            async with self.use(slot):
                pass
        except ModelLoadError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise

    async def tend(self, on_ready: Callable[[], None]) -> None:
        """Load the models of the start, then unload idle ones now and then, until cancelled."""
        await self.load_first()
        on_ready()
        while True:
            await asyncio.sleep(TEND_S)
            try:
                await self.unload_idle()
            except DeviceLostError:
                raise
            except Exception as error:  # such as no thread for it: the server still answers
                log.error("idle models not unloaded", exc_info=error)

    async def load_first(self) -> None:
        """Load pinned and preloaded models; raises the reason if a pinned one cannot be loaded."""
        first = [slot for slot in self._slots if slot.entry.pinned]
        first += [slot for slot in self._slots if slot.entry.preload and not slot.entry.pinned]
        for slot in first:
            fits = self.held_bytes + slot.need_bytes <= self.limit_bytes
            if fits or slot.entry.pinned:
                await self.load(slot.entry.name)
        self.started = True

    async def unload(self, name: str, drain_s: float = 0.0) -> None:
        """Unload a model. It may finish its answers within `drain_s`, and begins no new ones.

        Raises:
            InvalidRequestError: it is pinned.
            HttpError: it still answered then, and goes on.
        """
        slot = self.find(name)
        if slot.pinned:
            raise InvalidRequestError(f"The model {slot.entry.name} is pinned, and so it stays.")
        with _leaving(slot):
            until_s = time.monotonic() + drain_s
            while slot.users and time.monotonic() < until_s:
                await asyncio.sleep(POLL_S)
            # a client that leaves does not leave the model half unloaded
            await asyncio.shield(_task(self._put_out_asked(slot)))

    async def _put_out_asked(self, slot: ModelSlot) -> None:
        with _leaving(slot):
            async with self._changing:
                if slot.users:
                    raise HttpError(
                        "model_busy",
                        f"The model {slot.entry.name} answers {slot.users} requests; wait for "
                        "them, or give them some seconds with drain_s.",
                    )
                if slot.loaded:
                    await self._put_out(slot, "asked")

    async def unload_idle(self) -> None:
        """Unload models that were unused for their ttl, and forget those whose engine ended.

        Raises:
            DeviceLostError: no engine of this process would work.
        """
        for slot in self.slots():
            self._notice_end(slot)
            if slot.entry.ttl_s is not None and slot.idle and slot.ttl_left_s == 0.0:
                async with self._changing:
                    if slot.idle and slot.ttl_left_s == 0.0:
                        with contextlib.suppress(OverloadedError):  # it is stuck, which shows
                            await self._put_out(slot, "idle")

    def close(self) -> None:
        """End all models, and loads that are under way. Models that are stuck are left behind.

        Called when the event loop has ended.
        """
        ends = [in_background(partial(_end, slot), "mlxinfer-close") for slot in self._slots]
        wait(ends, timeout=CLOSE_S)

    # -- which models there are -----------------------------------------------------------------

    def add(self, entry: RegistryEntry) -> None:
        """Take in one more model, to be loaded when a request names it.

        Models that are not loaded get new KV budgets; the others keep theirs while they are loaded.

        Raises:
            InvalidRequestError: a name is taken, or it does not fit beside the pinned models.
        """
        self._check_free(entry)
        slot = ModelSlot(entry, 0, entry.weights_bytes, self._clock)
        self._share_kv([*self._slots, slot])
        self._append(slot)

    async def remove(self, name: str, drain_s: float = 0.0) -> None:
        """Unload a model and forget it; the others share the KV budget.

        Raises:
            InvalidRequestError: it is pinned, the default, or the only one.
            HttpError: it still answered after `drain_s`, and stays.
        """
        slot = self.find(name)
        if slot is self._default or len(self._slots) == 1:
            raise InvalidRequestError(f"The model {name} answers by default, and so it stays.")
        await self.unload(name, drain_s)
        self._slots.remove(slot)
        self._by_name = {name: other for name, other in self._by_name.items() if other is not slot}
        self._share_kv(self._slots)

    def _append(self, slot: ModelSlot) -> None:
        self._check_free(slot.entry)
        self._slots.append(slot)
        self._by_name |= dict.fromkeys((slot.entry.name, *slot.entry.aliases), slot)

    def _check_free(self, entry: RegistryEntry) -> None:
        names = (entry.name, *entry.aliases)
        for at, name in enumerate(names):
            if name in self._by_name or name in names[:at]:
                raise InvalidRequestError(f"Two models are called {name}; rename one of them.")

    def _share_kv(self, slots: Sequence[ModelSlot]) -> None:
        budgets = kv_budgets(slots, self.limit_bytes)
        for slot in slots:
            if slot.state is State.UNLOADED:
                slot.kv_bytes = budgets[slot.entry.name]

    # -- adapters -------------------------------------------------------------------------------

    async def load_adapter(self, model: str | None, name: str, folder: Path) -> None:
        """Load an adapter of a model. The model is loaded first, and keeps it for later loads."""
        slot = self.find(model)  # a client that leaves does not leave the adapter half loaded
        await asyncio.shield(_task(self._load_adapter(slot, name, folder)))

    async def _load_adapter(self, slot: ModelSlot, name: str, folder: Path) -> None:
        async with self.use(slot) as served:
            await _give_adapter(served, name, folder)
            slot.adapters[name] = folder
            slot.adapter_failures.pop(name, None)

    async def unload_adapter(self, model: str | None, name: str) -> None:
        slots = self._slots if model is None else [self.find(model)]
        for slot in slots:
            if name in slot.adapters and slot.loading is not None:
                await asyncio.wait({slot.loading})  # the adapter is loaded with the model
            if name in slot.adapters:
                del slot.adapters[name]
                failed = slot.adapter_failures.pop(name, None) is not None
                if slot.served is not None and not failed:
                    work = partial(slot.served.session.unload_adapter, name)
                    await apart(work, "mlxinfer-adapter")
                return
        raise ModelNotFoundError(f"There is no adapter {name[:100]!r} here.")

    # -- loads and unloads, one at a time -------------------------------------------------------

    async def _bring_in(self, slot: ModelSlot) -> ServedModel:
        """Load a model."""
        try:
            async with self._changing:
                if slot.state is State.UNLOADING:
                    raise slot.stuck()
                await self._make_room(slot, slot.need_bytes)
                began_s = time.monotonic()
                served = await self._open(slot)
            if self.started:
                took_s = round(time.monotonic() - began_s, 2)
                log.info("model loaded", extra={"model": slot.entry.name, "seconds": took_s})
            return served
        finally:
            slot.loading = None

    async def _open(self, slot: ModelSlot) -> ServedModel:
        slot.entry.progress(0, slot.weights_bytes)
        slot.state = State.LOADING
        served: ServedModel | None = None
        try:
            room = slot.need_bytes
            slot.opening = in_background(partial(slot.entry.load, room), "mlxinfer-load")
            served = await asyncio.wrap_future(slot.opening)
            slot.opening = None
            slot.weights_bytes = served.session.info.weights_bytes
            if slot.entry.kv_bytes is None:
                slot.kv_bytes = max(room - slot.weights_bytes, 0)
            await self._make_room(slot, 0)
            slot.adapter_failures.clear()
            for name, folder in slot.adapters.items():
                await self._give_own_adapter(slot, served, name, folder)
        except BaseException as error:  # the fault boundary of a load, also a cancelled one
            if served is not None:
                await apart(served.session.close, "mlxinfer-unload")
            slot.state = State.UNLOADED
            if not isinstance(error, Exception):
                raise
            raise self._failed(slot, error) from error
        self._take_in(slot, served)
        return served

    async def _give_own_adapter(
        self, slot: ModelSlot, served: ServedModel, name: str, folder: Path
    ) -> None:
        """Load one adapter of a model. If it is broken, the model is loaded without it.

        At the start of the server the error is raised, because the command line named the folder.
        """
        try:
            await _give_adapter(served, name, folder)
        except EngineClosedError:  # that is a failure of the model
            raise
        except Exception as error:  # whatever is wrong with its files: the model answers without
            if not self.started:
                raise
            slot.adapter_failures[name] = error
            _log_failure("adapter", error, model=slot.entry.name, adapter=name)

    def _take_in(self, slot: ModelSlot, served: ServedModel) -> None:
        slot.weights_bytes = served.session.info.weights_bytes
        slot.max_context, slot.capabilities = served.session.limits.max_context, served.capabilities
        slot.defaults, slot.facts = served.defaults, served.facts
        slot.served = served
        slot.state = State.LOADED
        slot.used_s = self._clock()
        slot.failure = None
        slot.failures_in_a_row = 0
        slot.num_loads += 1

    def _failed(self, slot: ModelSlot, error: Exception) -> ModelLoadError:
        slot.failure = error
        slot.num_failures += 1
        pause_s = slot.fail()
        if self.started:
            failures = slot.failures_in_a_row
            _log_failure("model", error, model=slot.entry.name, failures=failures, pause_s=pause_s)
        return slot.not_loaded(pause_s)

    async def _make_room(self, slot: ModelSlot, num_bytes: int) -> None:
        """Unload idle models, the longest unused first, until `num_bytes` more fit."""
        while (over := self.held_bytes + num_bytes - self.limit_bytes) > 0:
            idle = sorted((s for s in self._slots if s.idle), key=lambda s: s.used_s)
            if sum(s.held_bytes for s in idle) < over:
                raise OverloadedError(
                    f"There is no room for the model {slot.entry.name}: {human_bytes(over)} are "
                    "missing, and the other models are in use; try again later.",
                    retry_after_s=BUSY_RETRY_S,
                )
            await self._put_out(idle[0], "memory")

    async def _put_out(self, slot: ModelSlot, reason: str) -> None:
        """Unload an idle model; the caller holds `_changing`.

        Raises:
            OverloadedError: it does not end; its memory stays taken until it does.
        """
        assert slot.idle
        assert slot.served is not None
        closing = apart(slot.served.session.close, "mlxinfer-unload")
        slot.served, slot.state = None, State.UNLOADING
        slot.unloads[reason] = slot.unloads.get(reason, 0) + 1
        closing.add_done_callback(lambda done: _gone(slot, reason, done.exception()))
        await asyncio.wait({closing}, timeout=UNLOAD_S)
        if not closing.done():
            raise slot.stuck()

    def _notice_end(self, slot: ModelSlot) -> None:
        """Forget a model whose engine ended in a fault: its memory is free.

        It is not loaded again at once, because it may be too large for this machine.

        Raises:
            DeviceLostError: no engine of this process would work.
        """
        if isinstance(slot.failure, DeviceLostError):  # of its load
            raise slot.failure
        if slot.served is None or not slot.served.session.closed:
            return
        try:
            slot.served.session.require_open()
        except DeviceLostError:
            raise
        except EngineClosedError:
            pass
        in_background(slot.served.session.close, "mlxinfer-unload")
        slot.served, slot.state = None, State.UNLOADED
        slot.unloads["fault"] = slot.unloads.get("fault", 0) + 1
        pause_s = slot.fail()
        log.error("model ended by itself", extra={"model": slot.entry.name, "pause_s": pause_s})


def _log_failure(what: str, error: Exception, **extra: object) -> None:
    """Log that something was not loaded; with a traceback if the error is not one of ours."""
    known = isinstance(error, MlxinferError)
    log.error("%s not loaded: %s", what, error, exc_info=not known, extra=extra)


def _task(work: "Coroutine[Any, Any, Any]") -> "asyncio.Task[Any]":
    """A task whose error may stay unread: no one awaits it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _give_adapter(served: ServedModel, name: str, folder: Path) -> None:
    """Load an adapter of a model beside its requests; raises as `Session.load_adapter`."""
    work = partial(served.session.load_adapter, name, folder)
    await apart(work, "mlxinfer-adapter")


@contextmanager
def _leaving(slot: ModelSlot) -> Iterator[None]:
    slot.leaving += 1
    try:
        yield
    finally:
        slot.leaving -= 1


def _gone(slot: ModelSlot, reason: str, error: BaseException | None) -> None:
    slot.state = State.UNLOADED
    log.info("model unloaded", extra={"model": slot.entry.name, "reason": reason})
    if error is not None:
        log.error("model ended badly", exc_info=error, extra={"model": slot.entry.name})


def _end(slot: ModelSlot) -> None:
    """Close a model; one that is being loaded is awaited first."""
    served = slot.served
    if slot.opening is not None:
        slot.entry.stop()
        served = slot.opening.result()
    if served is not None:
        served.session.close()
