"""The models of a server by name: loaded on request, unloaded when idle or in the way.

Knows names and the number of users of each model; no memory, no requests.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import asynccontextmanager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from ...errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from ..background import in_background
from ..errors import ModelBusyError, ModelLoadError
from .budget import Need, kv_budgets
from .loader import Loader, load_adapter, not_loaded
from .served import ServedModel
from .slots import Entry, Slot, State

CLOSE_S = 30.0  # that all may take at the end of the server
POLL_S = 0.02


class Models:
    """Models by name; the first one answers requests that name none.

    Lives on one event loop, `close` apart.

    Args:
        entries: at least one.
        limit_bytes: of weights and KV caches of all loaded models together.
        clock: monotonic seconds.
        default: answers requests that name no model, or one that is not here; None: the first one
            answers those, and these are a 404.

    Raises:
        InvalidRequestError: two have one name, one does not fit, or the default is not here.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        limit_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        default: str | None = None,
    ) -> None:
        assert entries
        self.started = False  # what is to be there from the start is there
        self._clock = clock
        needs = [Need(e.name, e.weights_bytes, e.kv_bytes, e.pinned) for e in entries]
        budgets = kv_budgets(needs, limit_bytes)
        self._slots = [Slot(e, budgets[e.name], e.weights_bytes) for e in entries]
        self._loader = Loader(self._slots, limit_bytes, clock)
        self._by_name: dict[str, Slot] = {}
        for slot in self._slots:
            self._check_free(slot.entry)
            self._by_name |= dict.fromkeys((slot.entry.name, *slot.entry.aliases), slot)
        self._default: Slot | None = None
        if default is not None:
            if default not in self._by_name:
                raise InvalidRequestError(
                    f"The default model {default!r} is none of {', '.join(self.names())}.",
                    param="default_model",
                )
            self._default = self._by_name[default]

    @classmethod
    def of(cls, served: Sequence[ServedModel]) -> "Models":
        """Of models that are loaded already, and stay."""
        entries = [
            Entry(
                name=model.name,
                load=lambda _, model=model: model,  # type: ignore[misc]  # bound in its round
                kv_bytes=0,
                pinned=True,
                created_s=model.created_s,
            )
            for model in served
        ]
        models = cls(entries, limit_bytes=sum(model.info.weights_bytes for model in served))
        for slot, model in zip(models._slots, served, strict=True):
            models._loader.take_in(slot, model)
        models._begin()
        return models

    # -- what there is --------------------------------------------------------------------------

    def names(self) -> list[str]:
        """In the order in which they were given, without aliases."""
        return [slot.entry.name for slot in self._slots]

    def slots(self) -> list[Slot]:
        """All of them, to be looked at."""
        return list(self._slots)

    def running(self) -> list[ServedModel]:
        """Those that are loaded."""
        return [slot.served for slot in self._slots if slot.served is not None]

    @property
    def limit_bytes(self) -> int:
        """Of weights and KV caches of all loaded models together."""
        return self._loader.limit_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the models that are loaded, being loaded or being unloaded."""
        return self._loader.held_bytes

    def find(self, name: str | None) -> Slot:
        """The model of a name, see `resolve`."""
        return self.resolve(name)[0]

    def resolve(self, name: str | None) -> tuple[Slot, str | None]:
        """The model of a name, an alias or a pattern such as `claude-*`, or the default one.

        Without a name it is the default one, or the first. `model:adapter`, or the adapter's name
        alone where no other model has one of that name, means a model with an adapter: the second
        value.

        Raises:
            ModelNotFoundError: no model is called so. Requests never load by path.
        """
        if name is None:
            return self._default or self._slots[0], None
        slot = self._by_name.get(name) or self._like(name)
        if slot is not None:
            return slot, None
        having = [slot for slot in self._slots if name in slot.adapters]
        if len(having) == 1:
            return having[0], name
        base, _, adapter = name.rpartition(":")
        slot = self._by_name.get(base) or self._like(base)
        if slot is not None and adapter in slot.adapters:
            return slot, adapter
        if self._default is None or slot is not None:
            raise self._no_model(name, slot)
        return self._default, None

    def _no_model(self, name: str, slot: Slot | None) -> ModelNotFoundError:
        if slot is None:
            names = ", ".join(self.names())
            return ModelNotFoundError(f"There is no model {name[:100]!r} here; there is: {names}.")
        adapters = ", ".join(slot.adapters) or "none"
        return ModelNotFoundError(
            f"There is no model {name[:100]!r} here; the adapters of {slot.entry.name} are: "
            f"{adapters}."
        )

    def _like(self, name: str) -> Slot | None:
        """The model of the first alias with a `*` that matches."""
        patterns = (alias for alias in self._by_name if "*" in alias)
        return next((self._by_name[a] for a in patterns if fnmatchcase(name, a)), None)

    def ttl_left_s(self, slot: Slot) -> float | None:
        """Seconds until a model may be unloaded for idleness; None: that does not happen."""
        return slot.ttl_left_s(self._clock())

    def retry_left_s(self, slot: Slot) -> float:
        """Seconds until a model that failed to load may be tried again; 0: it may be loaded."""
        return slot.brake.left_s(self._clock())

    # -- use ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model of a name, loaded if it is not, and kept until the block ends.

        Raises:
            ModelNotFoundError: no model is called so.
            ModelLoadError: it could not be loaded, or not lately.
            OverloadedError: the models in its way are in use, or it is being unloaded.
        """
        slot = self.find(name)
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

    async def _loaded(self, slot: Slot) -> ServedModel:
        """Load a model once for all calls that wait; the load goes on if all of them leave."""
        if slot.loading is None:
            if left_s := self.retry_left_s(slot):
                raise not_loaded(slot, left_s)
            slot.loading = asyncio.create_task(self._loader.bring_in(slot))
            slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(slot.loading)

    # -- adapters -------------------------------------------------------------------------------

    async def load_adapter(self, model: str | None, name: str, folder: Path) -> None:
        """Load an adapter of a model, which is loaded first; it has it at later loads, too.

        Raises:
            as `use` and `Session.load_adapter`.
        """
        work = asyncio.create_task(self._load_adapter(self.find(model), name, folder))
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(work)  # a client that leaves does not leave it half loaded

    async def _load_adapter(self, slot: Slot, name: str, folder: Path) -> None:
        async with self.use(slot.entry.name) as served:
            await load_adapter(served, name, folder)
            slot.adapters[name] = folder
            slot.adapter_failures.pop(name, None)

    async def unload_adapter(self, model: str | None, name: str) -> None:
        """Let no new request name an adapter; raises ModelNotFoundError where there is none."""
        slots = self._slots if model is None else [self.find(model)]
        for slot in slots:
            if name in slot.adapters and slot.loading is not None:
                await asyncio.wait({slot.loading})  # the adapter is loaded with the model
            if name in slot.adapters:
                del slot.adapters[name]
                failed = slot.adapter_failures.pop(name, None) is not None
                if slot.served is not None and not failed:
                    work = partial(slot.served.generator.unload_adapter, name)
                    await asyncio.wrap_future(in_background(work, "mlxinfer-adapter"))
                return
        raise ModelNotFoundError(f"There is no adapter {name[:100]!r} here.")

    # -- changes --------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take in one more model, to be loaded when a request names it.

        Models that are not loaded get new KV budgets; the others keep theirs while they are loaded.

        Raises:
            InvalidRequestError: a name is taken, or it does not fit beside the pinned models.
        """
        self._check_free(entry)
        slot = Slot(entry, 0, entry.weights_bytes)
        self._share_kv([*self._slots, slot])
        self._slots.append(slot)
        self._by_name |= dict.fromkeys((entry.name, *entry.aliases), slot)

    async def remove(self, name: str, drain_s: float = 0.0) -> None:
        """Unload a model and forget it; the others share the KV budget.

        Raises:
            InvalidRequestError: it is pinned, the default, or the only one.
            ModelBusyError: it still answered after `drain_s`, and stays.
        """
        slot = self.find(name)
        if slot is self._default or len(self._slots) == 1:
            raise InvalidRequestError(f"The model {name} answers by default, and so it stays.")
        await self.unload(name, drain_s)
        self._slots.remove(slot)
        self._by_name = {name: each for name, each in self._by_name.items() if each is not slot}
        self._share_kv(self._slots)

    def _share_kv(self, slots: Sequence[Slot]) -> None:
        """Give models that are not loaded their KV budgets; raises InvalidRequestError."""
        needs = [Need(s.entry.name, s.weights_bytes, s.entry.kv_bytes, s.pinned) for s in slots]
        budgets = kv_budgets(needs, self.limit_bytes)
        for slot in slots:
            if slot.state is State.UNLOADED:
                slot.kv_bytes = budgets[slot.entry.name]

    def pin(self, name: str, pinned: bool) -> None:
        """Keep a model loaded once it is, or let it go again; raises ModelNotFoundError."""
        self.find(name).pinned = pinned

    async def load_first(self) -> None:
        """Load pinned and preloaded models; raises the reason if a pinned one cannot be loaded."""
        first = [slot for slot in self._slots if slot.entry.pinned]
        first += [slot for slot in self._slots if slot.entry.preload and not slot.entry.pinned]
        for slot in first:
            fits = self.held_bytes + slot.need_bytes <= self.limit_bytes
            if fits or slot.entry.pinned:
                await self.load(slot.entry.name)
        self._begin()

    def _begin(self) -> None:
        self.started = True
        self._loader.quiet = False

    async def load(self, name: str) -> None:
        """Load a model if it is not; raises as `use`, but with the reason of a failure."""
        slot = self.find(name)
        slot.brake.release()  # an explicit request tries it at once
        try:
            async with self.use(name):
                pass
        except ModelLoadError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise

    async def unload(self, name: str, drain_s: float = 0.0) -> None:
        """Unload a model; it may end what it answers within `drain_s`, and begins nothing new.

        Raises:
            InvalidRequestError: it is pinned.
            ModelBusyError: it still answered then, and goes on.
        """
        slot = self.find(name)
        if slot.pinned:
            raise InvalidRequestError(f"The model {slot.entry.name} is pinned, and so it stays.")
        with _leaving(slot):
            await self._until_unused(slot, drain_s)
            work = asyncio.create_task(self._put_out(slot))
            work.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(work)  # a client that leaves does not leave it half unloaded

    async def _put_out(self, slot: Slot) -> None:
        with _leaving(slot):
            async with self._loader.changing:
                if slot.users:
                    raise ModelBusyError(
                        f"The model {slot.entry.name} answers {slot.users} requests; wait for "
                        "them, or give them some seconds with drain_s."
                    )
                if slot.state is State.LOADED:
                    await self._loader.put_out(slot, "asked")

    def _notice_end(self, slot: Slot) -> None:
        """Forget a model after its engine ended in a fault."""
        if slot.served is not None and slot.served.closed:
            self._loader.lose(slot)

    async def unload_idle(self) -> None:
        """Unload models unused for their ttl, and forget those with an engine that ended."""
        for slot in self.slots():
            self._notice_end(slot)
            if slot.idle and self.ttl_left_s(slot) == 0.0:
                async with self._loader.changing:
                    if slot.idle and self.ttl_left_s(slot) == 0.0:
                        with contextlib.suppress(OverloadedError):  # it is stuck, which shows
                            await self._loader.put_out(slot, "idle")

    def close(self) -> None:
        """End all of them, and loads that are under way; what is stuck is left behind.

        Called when the event loop has ended.
        """
        ends = [in_background(partial(_end, slot), "mlxinfer-close") for slot in self._slots]
        wait(ends, timeout=CLOSE_S)

    def _check_free(self, entry: Entry) -> None:
        names = (entry.name, *entry.aliases)
        for at, name in enumerate(names):
            if name in self._by_name or name in names[:at]:
                raise InvalidRequestError(f"Two models are called {name}; rename one of them.")

    async def _until_unused(self, slot: Slot, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while slot.users and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)


@contextmanager
def _leaving(slot: Slot) -> Iterator[None]:
    slot.leaving += 1
    try:
        yield
    finally:
        slot.leaving -= 1


def _end(slot: Slot) -> None:
    """Close a model; one that is on its way is there first."""
    served = slot.served
    if slot.opening is not None:
        slot.entry.stop()
        served = slot.opening.result()
    if served is not None:
        served.close()
