"""Loads and unloads models within a memory limit. Knows slots; no names, no calls.

Loads and unloads run one after the other, off the event loop, so that no two loads compete for the
disk, and the sum of the memory in use holds.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import EngineClosedError, MlxinferError, OverloadedError
from ...memory import human_bytes
from ..background import in_background
from ..errors import ModelLoadError
from .served import ServedModel
from .slots import Slot, State

BUSY_RETRY_S = 10.0  # after which a model in the way may be idle
UNLOAD_S = 60.0  # that a model may take to end; one that is stuck holds its memory
POLL_S = 0.02
log = logging.getLogger("mlxinfer.server")


def not_loaded(slot: Slot, left_s: float) -> ModelLoadError:
    """The error of requests to a model that failed to load, and is tried again in `left_s`."""
    count = slot.brake.num_failures
    times = "" if count == 1 else f" {count} times in a row"
    return ModelLoadError(
        f"The model {slot.entry.name} could not be loaded{times}; the server's log says why. "
        f"It is tried again in {math.ceil(left_s)} seconds, or by `mlxinfer load`.",
        retry_after_s=left_s,
    )


async def load_adapter(served: ServedModel, name: str, folder: Path) -> None:
    """Load an adapter of a model beside its requests; raises as `Session.load_adapter`."""
    work = in_background(lambda: served.generator.load_adapter(name, folder), "mlxinfer-adapter")
    await asyncio.wrap_future(work)


class Loader:
    """Loads and unloads models.

    Args:
        slots: all models; those in the way of another are unloaded.
        limit_bytes: of weights and KV caches of all loaded models together.
        clock: monotonic seconds.

    Attributes:
        changing: held during a change.
        quiet: nothing is logged: at the start errors are raised to the caller.
    """

    def __init__(self, slots: Sequence[Slot], limit_bytes: int, clock: Callable[[], float]) -> None:
        self.limit_bytes = limit_bytes
        self.changing = asyncio.Lock()
        self.quiet = True
        self._slots = slots
        self._clock = clock

    @property
    def held_bytes(self) -> int:
        """Bytes of the models that are loaded, being loaded or being unloaded."""
        return sum(slot.held_bytes for slot in self._slots)

    async def bring_in(self, slot: Slot) -> ServedModel:
        """Load a model.

        Raises:
            ModelLoadError: it cannot be.
            OverloadedError: the models in its way are in use, or stuck.
        """
        try:
            async with self.changing:
                if slot.state is State.UNLOADING:
                    raise OverloadedError(
                        f"The model {slot.entry.name} is stuck while it is unloaded.",
                        retry_after_s=BUSY_RETRY_S,
                    )
                await self._make_room(slot, slot.need_bytes)
                began_s = time.monotonic()
                served = await self._open(slot)
            if not self.quiet:
                took_s = round(time.monotonic() - began_s, 2)
                log.info("model loaded", extra={"model": slot.entry.name, "seconds": took_s})
            return served
        finally:
            slot.loading = None

    async def _open(self, slot: Slot) -> ServedModel:
        """Load the model of a slot into memory that is free."""
        slot.state = State.LOADING
        served: ServedModel | None = None
        try:
            room = slot.need_bytes
            slot.opening = in_background(lambda: slot.entry.load(room), "mlxinfer-load")
            served = await asyncio.wrap_future(slot.opening)
            slot.opening = None
            slot.weights_bytes = served.info.weights_bytes
            if slot.entry.kv_bytes is None:
                slot.kv_bytes = max(room - slot.weights_bytes, 0)
            await self._make_room(slot, 0)
            slot.adapter_failures.clear()
            for name, folder in slot.adapters.items():
                await self._give_adapter(slot, served, name, folder)
        except BaseException as error:  # the fault boundary of a load, also a cancelled one
            if served is not None:
                await asyncio.wrap_future(in_background(served.close, "mlxinfer-unload"))
            slot.state = State.UNLOADED
            if not isinstance(error, Exception):
                raise
            raise self._failed(slot, error) from error
        self.take_in(slot, served)
        return served

    async def _give_adapter(self, slot: Slot, served: ServedModel, name: str, folder: Path) -> None:
        """Load one adapter of a model; with a broken one the model is loaded without it.

        At the start the error is raised: the command line named the folder.
        """
        try:
            await load_adapter(served, name, folder)
        except EngineClosedError:  # that is a failure of the model
            raise
        except Exception as error:  # whatever is wrong with its files: the model answers without
            if self.quiet:
                raise
            slot.adapter_failures[name] = error
            extra = {"model": slot.entry.name, "adapter": name}
            known = isinstance(error, MlxinferError)
            log.error("adapter not loaded: %s", error, exc_info=not known, extra=extra)

    def take_in(self, slot: Slot, served: ServedModel) -> None:
        """Record that the model of a slot is loaded."""
        slot.weights_bytes = served.info.weights_bytes
        slot.max_context, slot.capabilities = served.max_context, served.capabilities
        slot.served = served
        slot.state = State.LOADED
        slot.used_s = self._clock()
        slot.failure = None
        slot.brake.release()
        slot.num_loads += 1

    def _failed(self, slot: Slot, error: Exception) -> ModelLoadError:
        """The error of the waiting requests; its reason is only logged, as it may name paths."""
        name = slot.entry.name
        slot.failure = error
        slot.num_failures += 1
        pause_s = slot.brake.fail(self._clock())
        if not self.quiet:
            known = isinstance(error, MlxinferError)
            extra = {"model": name, "failures": slot.brake.num_failures, "pause_s": pause_s}
            log.error("model not loaded: %s", error, exc_info=not known, extra=extra)
        return not_loaded(slot, pause_s)

    async def _make_room(self, slot: Slot, num_bytes: int) -> None:
        """Unload idle models, the longest unused first, until so many bytes more fit.

        Raises:
            OverloadedError: they would not be enough; then none is unloaded.
        """
        while (over := self.held_bytes + num_bytes - self.limit_bytes) > 0:
            idle = sorted((s for s in self._slots if s.idle), key=lambda s: s.used_s)
            if sum(s.held_bytes for s in idle) < over:
                raise OverloadedError(
                    f"There is no room for the model {slot.entry.name}: {human_bytes(over)} are "
                    "missing, and the other models are in use; try again later.",
                    retry_after_s=BUSY_RETRY_S,
                )
            await self.put_out(idle[0], "memory")

    async def put_out(self, slot: Slot, reason: str) -> None:
        """Unload an idle model; the caller holds `changing`.

        Raises:
            OverloadedError: it does not end; its memory stays taken until it does.
        """
        assert slot.idle
        assert slot.served is not None
        closing = asyncio.wrap_future(in_background(slot.served.close, "mlxinfer-unload"))
        slot.served, slot.state = None, State.UNLOADING
        slot.unloads[reason] = slot.unloads.get(reason, 0) + 1
        closing.add_done_callback(lambda done: self._gone(slot, reason, done.exception()))
        await asyncio.wait({closing}, timeout=UNLOAD_S)
        if not closing.done():
            raise OverloadedError(
                f"The model {slot.entry.name} is stuck while it is unloaded.",
                retry_after_s=BUSY_RETRY_S,
            )

    def lose(self, slot: Slot) -> None:
        """Note that a model has ended by itself: it gave back its memory, and is loaded anew.

        Not at once: it may have been too large for this machine.
        """
        assert slot.served is not None
        in_background(slot.served.close, "mlxinfer-unload")
        slot.served, slot.state = None, State.UNLOADED
        slot.unloads["fault"] = slot.unloads.get("fault", 0) + 1
        pause_s = slot.brake.fail(self._clock())
        log.error("model ended by itself", extra={"model": slot.entry.name, "pause_s": pause_s})

    def _gone(self, slot: Slot, reason: str, error: BaseException | None) -> None:
        slot.state = State.UNLOADED
        log.info("model unloaded", extra={"model": slot.entry.name, "reason": reason})
        if error is not None:
            log.error("model ended badly", exc_info=error, extra={"model": slot.entry.name})
