"""The models of a server: each as it is loaded, its state and users, and its share of memory."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

from ..config import KVOptions
from ..core import SamplingParams
from ..errors import InvalidRequestError, OverloadedError
from ..memory import KV_SHARE, human_bytes
from ..session.model_params import read_sampling
from ..session.options import EngineOptions
from ..session.pooling_session import PoolingSession, open_session
from ..session.session import Session
from ..text import Tokenizer
from .errors import ModelLoadError

CAPABILITIES = (
    "chat", "completion", "tools", "reasoning", "infill", "vision", "embeddings", "rerank",
)  # fmt: skip


@dataclass(slots=True, weakref_slot=True, eq=False)
class ServedModel:
    """A loaded model under the name that requests call it by.

    Attributes:
        defaults: sampling values for fields that a request leaves out: those of the model's
            generation_config.json, or else OpenAI's, such as temperature 1.
        session: of a model for vectors or scores it is a PoolingSession, which refuses the rest.
        reasoning_effort: of conversations that say nothing of it; None: the chat template's own.
    """

    name: str
    session: Session
    defaults: SamplingParams
    created_s: int  # seconds since 1970
    adapter: str | None = None
    reasoning_effort: str | None = None

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        options: EngineOptions,
        *,
        created_s: int,
        tool_format: str = "auto",
        reasoning_effort: str | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> "ServedModel":
        """Load the model in `folder`; `watch`: see Session.

        Raises as Session, and CheckpointError as `read_sampling`.
        """
        values = {"temperature": 1.0, "max_tokens": None, **read_sampling(folder)}
        session = cast(Session, open_session(name, folder, options, tool_format, watch))
        return cls(
            name=name,
            session=session,
            defaults=SamplingParams(**values),
            created_s=created_s,
            reasoning_effort=reasoning_effort,
        )

    def with_adapter(self, adapter: str) -> "ServedModel":
        return replace(self, name=f"{self.name}:{adapter}", adapter=adapter)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.session.tokenizer

    @property
    def pooler(self) -> PoolingSession:
        if "rerank" not in self.session.capabilities:
            raise InvalidRequestError(
                f"{self.name} generates text and gives no vectors and scores; name an embedding "
                "model or a reranker. /v1/models says what each model is for.",
                param="model",
            )
        return cast(PoolingSession, self.session)

    @property
    def facts(self) -> "ModelFacts":
        info = self.session.info
        return ModelFacts(info.vocab_size, info.thinking, self.session.chat_params)

    @property
    def capabilities(self) -> dict[str, bool]:
        can = self.session.capabilities
        return {name: name in can for name in CAPABILITIES}


# -- entries, and their state ---------------------------------------------------------------------

FIRST_PAUSE_S = 10.0
MAX_PAUSE_S = 600.0
BUSY_RETRY_S = 10.0  # after which a model in the way may be idle


@dataclass(slots=True)
class LoadProgress:
    """How far a model is loaded; called as the watch of a Session, from any thread."""

    loaded_bytes: int = 0
    total_bytes: int = 0

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        self.loaded_bytes, self.total_bytes = loaded_bytes, total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryEntry:
    """One model that a server may load.

    Attributes:
        load: makes the model run within given bytes, weights and KV cache together (the cache
            alone has `kv_bytes`, where that is given); called off the event loop.
        weights_bytes: as its files say. The true size is known once it was loaded.
        aliases: further names that requests may use; `*` in one stands for anything.
        kv_bytes: a KV budget of its own; None: a share of the server's.
        pinned: loaded at the start, and never unloaded.
        preload: loaded at the start, if there is room.
        ttl_s: seconds without a request after which it is unloaded; None: never.
        created_s: seconds since 1970.
        source: a repository, a folder or a bundled name by which the model was asked for.
        adapters: that it has from its first load on: name -> folder.
        stop: makes a load that is under way raise soon, and all later ones: the server ends.
        progress: of the last load.
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
    folder: Path | None = None
    kv: KVOptions = field(default_factory=KVOptions)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    stop: Callable[[], None] = lambda: None
    progress: LoadProgress = field(default_factory=LoadProgress)

    @property
    def root(self) -> str:
        """The repository or bundled name of the model; of a folder its name, and not its path."""
        return self.name if os.path.isabs(self.source) else self.source or self.name


class State(StrEnum):
    """Whether a model is in memory, or being loaded or unloaded."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts for clients that use a model of a server as if it ran in their process.

    Attributes:
        thinking: what the chat template can be told, see ModelInfo.
        chat_params: how LLM.chat chooses tokens; None: it does not chat.
    """

    vocab_size: int
    thinking: tuple[str, ...]
    chat_params: SamplingParams | None


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
    facts: "ModelFacts | None" = None  # the same
    num_loads: int = 0
    num_failures: int = 0  # loads that failed
    unloads: dict[str, int] = field(default_factory=dict)  # by reason: idle, memory, asked, fault
    pinned: bool = field(init=False)
    adapters: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        self.pinned = self.entry.pinned
        self.adapters = dict(self.entry.adapters)

    def check_adapter(self, name: str) -> None:
        if name in self.adapter_failures:
            raise ModelLoadError(
                f"The adapter {name} of {self.entry.name} could not be loaded; the server's log "
                "says why. It is tried again whenever the model is loaded."
            )

    @property
    def need_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the model takes now; all of them while it is being loaded or unloaded."""
        return 0 if self.state is State.UNLOADED else self.need_bytes

    @property
    def loaded(self) -> bool:
        return self.state is State.LOADED

    @property
    def load_progress(self) -> dict[str, int] | None:
        """Bytes of weights that are loaded, and of all; None: it is not being loaded."""
        return asdict(self.entry.progress) if self.state is State.LOADING else None

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
        count = self.failures_in_a_row
        times = "" if count == 1 else f" {count} times in a row"
        return ModelLoadError(
            f"The model {self.entry.name} could not be loaded{times}; the server's log says why. "
            f"It is tried again in {math.ceil(left_s)} seconds, or by `mlxinfer load`.",
            retry_after_s=left_s,
        )

    def stuck(self) -> OverloadedError:
        return OverloadedError(
            f"The model {self.entry.name} is stuck while it is unloaded.",
            retry_after_s=BUSY_RETRY_S,
        )


# -- shares of memory -----------------------------------------------------------------------------

ENOUGH_SHARE = 1 / 16  # of what a model could have alone: to have less is worse than turns
MIN_KV_BYTES = 8 * 10**6


def kv_budgets(slots: Sequence[ModelSlot], limit_bytes: int) -> dict[str, int]:
    """How the limit is divided: bytes of KV cache for each model, by name.

    These rules are simple, so that an operator can do the sum. Budgets depend on the settings
    alone, never on the model that was loaded first.

    - The limit is for weights and KV caches together. By default it is seven tenths of the
      machine's memory. The arrays of a step need more memory for a moment.
    - A model with a KV budget of its own gets that.
    - If the weights of all models fit together and leave enough, the other models share the rest
      equally. Then no model is ever unloaded to make room.
    - Otherwise models take turns. Each gets the same share of the memory that the pinned models
      and the largest of the others leave, so that a few models are loaded at once.

    Raises:
        InvalidRequestError: a model does not fit beside the pinned ones.
    """
    share = _common_share(slots, limit_bytes)
    budgets = {n.entry.name: share if n.entry.kv_bytes is None else n.entry.kv_bytes for n in slots}
    for slot in slots:
        taken = sum(n.weights_bytes + budgets[n.entry.name] for n in _beside(slots, slot))
        if taken > limit_bytes or (slot.entry.kv_bytes is None and share < MIN_KV_BYTES):
            raise _does_not_fit(slot, slots, limit_bytes)
    return budgets


def _common_share(slots: Sequence[ModelSlot], limit_bytes: int) -> int:
    together = _share(slots, limit_bytes)
    crowds = [_beside(slots, slot) for slot in slots]
    shares = [_share(c, limit_bytes) for c in crowds if any(n.entry.kv_bytes is None for n in c)]
    alone = min(shares, default=0)
    enough = max(alone * ENOUGH_SHARE, MIN_KV_BYTES)
    return together if together >= enough else int(alone * KV_SHARE)


def _beside(slots: Sequence[ModelSlot], one: ModelSlot) -> list[ModelSlot]:
    return [slot for slot in slots if slot.pinned or slot is one]


def _share(slots: Sequence[ModelSlot], limit_bytes: int) -> int:
    """An equal share of the memory that these models leave; at least 0."""
    sharing = sum(slot.entry.kv_bytes is None for slot in slots)
    left = limit_bytes - sum(slot.weights_bytes + (slot.entry.kv_bytes or 0) for slot in slots)
    return max(left // max(sharing, 1), 0)


def _does_not_fit(
    one: ModelSlot, slots: Sequence[ModelSlot], limit_bytes: int
) -> InvalidRequestError:
    pinned = [slot for slot in slots if slot.pinned and slot is not one]
    beside = f" beside the pinned {', '.join(n.entry.name for n in pinned)}" if pinned else ""
    taken = sum(slot.weights_bytes + (slot.entry.kv_bytes or 0) for slot in [one, *pinned])
    return InvalidRequestError(
        f"The model {one.entry.name} does not fit{beside}: weights and KV caches need "
        f"more than {human_bytes(taken)}, and the limit is {human_bytes(limit_bytes)}; raise it "
        "with --max-memory, or take smaller weights.",
        param="max_memory",
    )
