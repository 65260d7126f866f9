"""One model of the registry: whether it is there, who uses it, when it may go. Knows no others."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from .brake import Brake
from .entries import Entry
from .served import ServedModel


class State(StrEnum):
    """Where a model is on its way into memory and out of it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(slots=True, eq=False)
class Slot:
    """Lives on the event loop; so nothing here is locked.

    Attributes:
        users: calls that use it or wait for it; while there is one it stays.
        used_s: when the last one left, by the registry's clock.
        leaving: unloads by hand that wait or work; nobody new is let in meanwhile.
    """

    entry: Entry
    kv_bytes: int
    weights_bytes: int
    state: State = State.UNLOADED
    served: ServedModel | None = None
    users: int = 0
    used_s: float = 0.0
    leaving: int = 0
    loading: "asyncio.Task[ServedModel] | None" = None
    opening: "Future[ServedModel] | None" = None  # the work of `loading`, in its thread
    failure: Exception | None = None  # why the last try to load it failed
    brake: Brake = field(default_factory=Brake)
    max_context: int | None = None  # known once it was loaded
    num_loads: int = 0
    num_failures: int = 0  # loads that failed
    unloads: dict[str, int] = field(default_factory=dict)  # by reason: idle, memory, asked, fault

    @property
    def need_bytes(self) -> int:
        """What it takes when it is loaded."""
        return self.weights_bytes + self.kv_bytes

    @property
    def held_bytes(self) -> int:
        """What it takes now; while it comes or goes all of it counts."""
        return 0 if self.state is State.UNLOADED else self.need_bytes

    @property
    def idle(self) -> bool:
        """Loaded, used by nobody, and not pinned: it may go."""
        return self.state is State.LOADED and not self.users and not self.entry.pinned

    def ttl_left_s(self, now_s: float) -> float | None:
        """Seconds until it may be unloaded for idleness; None: that does not happen."""
        ttl_s = self.entry.ttl_s
        if ttl_s is None or self.entry.pinned or self.state is not State.LOADED:
            return None
        return ttl_s if self.users else max(self.used_s + ttl_s - now_s, 0.0)
