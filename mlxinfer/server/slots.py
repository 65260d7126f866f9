"""One model of a server: what it is loaded from, its state, and its users."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ..core import SamplingParams
from ..errors import OverloadedError
from .errors import ModelLoadError
from .served import ServedModel

FIRST_PAUSE_S = 10.0
MAX_PAUSE_S = 600.0
BUSY_RETRY_S = 10.0  # after which a model in the way may be idle


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryEntry:
    """One model that a server may load.

    Attributes:
        name: that requests and answers use.
        load: makes the model run within so many bytes, weights and KV cache together (the cache
            alone has `kv_bytes`, where that is given); called off the event loop.
        weights_bytes: as its files say. The true size is known once it was loaded.
        aliases: further names that requests may use; `*` in one stands for anything.
        kv_bytes: a KV budget of its own; None: a share of the server's.
        pinned: loaded at the start, and never unloaded.
        preload: loaded at the start, as far as there is room.
        ttl_s: seconds without a request after which it is unloaded; None: never.
        created_s: seconds since 1970.
        source: a repository, a folder or a bundled name by which the model was asked for.
        kv_bits: of keys and of values in its KV cache; None: as computed.
        adapters: that it has from its first load on: name -> folder.
        stop: makes a load that is under way raise soon, and all later ones: the server ends.
    """

    name: str
    load: Callable[[int], ServedModel]
    weights_bytes: int = 0
    aliases: tuple[str, ...] = ()
    kv_bytes: int | None = None
    pinned: bool = False
    preload: bool = False
    ttl_s: float | None = None
    created_s: int = 0
    source: str = ""
    kv_bits: tuple[int | None, int | None] = (None, None)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    stop: Callable[[], None] = lambda: None


class State(StrEnum):
    """Whether a model is in memory, or being loaded or unloaded."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(slots=True, eq=False)
class ModelSlot:
    """One model of the server: its entry, its state and its users.

    Attributes:
        users: calls that use it or wait for it; while there is one it stays.
        clock: monotonic seconds.
        used_s: when the last user left.
        pinned: never unloaded; at first as the entry says.
        leaving: explicit unloads in progress; meanwhile new requests are refused.
        adapters: that it has whenever it is loaded: name -> folder.
        adapter_failures: why some adapters are missing although the model is loaded.
        retry_s: after failures in a row it is not loaded before.
    """

    entry: RegistryEntry
    kv_bytes: int
    weights_bytes: int
    clock: Callable[[], float] = time.monotonic
    state: State = State.UNLOADED
    served: ServedModel | None = None
    users: int = 0
    used_s: float = 0.0
    leaving: int = 0
    loading: asyncio.Task[ServedModel] | None = None
    opening: "Future[ServedModel] | None" = None  # the work of `loading`, in its thread
    failure: Exception | None = None  # why the last try to load it failed
    adapter_failures: dict[str, Exception] = field(default_factory=dict)
    failures_in_a_row: int = 0
    retry_s: float = 0.0
    max_context: int | None = None  # known once it was loaded
    capabilities: dict[str, bool] | None = None  # the same
    defaults: SamplingParams | None = None  # the same
    num_loads: int = 0
    num_failures: int = 0  # loads that failed
    unloads: dict[str, int] = field(default_factory=dict)  # by reason: idle, memory, asked, fault
    pinned: bool = field(init=False)
    adapters: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        self.pinned = self.entry.pinned
        self.adapters = dict(self.entry.adapters)

    def check_adapter(self, name: str) -> None:
        """Raise ModelLoadError where an adapter could not be loaded with the model."""
        if name in self.adapter_failures:
            raise ModelLoadError(
                f"The adapter {name} of {self.entry.name} could not be loaded; the server's log "
                "says why. It is tried again whenever the model is loaded."
            )

    @property
    def need_bytes(self) -> int:
        """Bytes that the model takes when it is loaded."""
        return self.weights_bytes + self.kv_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the model takes now; all of them while it is being loaded or unloaded."""
        return 0 if self.state is State.UNLOADED else self.need_bytes

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory."""
        return self.state is State.LOADED

    @property
    def idle(self) -> bool:
        """Loaded, without users, and not pinned: it may be unloaded."""
        return self.loaded and not self.users and not self.pinned

    @property
    def ttl_left_s(self) -> float | None:
        """Seconds until it may be unloaded for idleness; None: that does not happen."""
        ttl_s = self.entry.ttl_s
        if ttl_s is None or self.pinned or not self.loaded:
            return None
        return ttl_s if self.users else max(self.used_s + ttl_s - self.clock(), 0.0)

    @property
    def retry_left_s(self) -> float:
        """Seconds until a model that failed to load may be tried again; 0: it may be loaded."""
        return max(self.retry_s - self.clock(), 0.0) if self.failures_in_a_row else 0.0

    def fail(self) -> float:
        """Count a failure; returns the seconds until the next attempt.

        A load that fails may have read hundreds of gigabytes, and unloaded other models to make
        room. So the pause doubles with each failure in a row. A load that succeeds, and an explicit
        request to load, end it.
        """
        doublings = min(self.failures_in_a_row, 30)  # far past the longest pause
        pause_s = min(FIRST_PAUSE_S * 2**doublings, MAX_PAUSE_S)
        self.failures_in_a_row += 1
        self.retry_s = self.clock() + pause_s
        return pause_s

    def not_loaded(self, left_s: float) -> ModelLoadError:
        """The error of requests to a model that failed to load, and is tried again in `left_s`."""
        count = self.failures_in_a_row
        times = "" if count == 1 else f" {count} times in a row"
        return ModelLoadError(
            f"The model {self.entry.name} could not be loaded{times}; the server's log says why. "
            f"It is tried again in {math.ceil(left_s)} seconds, or by `mlxinfer load`.",
            retry_after_s=left_s,
        )

    def stuck(self) -> OverloadedError:
        """The error of requests to a model that does not end."""
        return OverloadedError(
            f"The model {self.entry.name} is stuck while it is unloaded.",
            retry_after_s=BUSY_RETRY_S,
        )
