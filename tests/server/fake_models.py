"""Models for the registry that take no time and no memory, and watch how they are treated."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlxinfer.core import SamplingParams
from mlxinfer.errors import CheckpointError
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.slots import ModelFacts, RegistryEntry

MB = 10**6


@dataclass(eq=False)
class FakeModel:
    """What the registry needs of a ServedModel."""

    name: str
    num_bytes: int
    machine: "Machine"
    closed: bool = False
    max_context: int = 2048
    capabilities: dict[str, bool] = field(default_factory=dict)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    facts: ModelFacts | None = None
    created_s: int = 1
    adapters: list[str] = field(default_factory=list)

    @property
    def session(self) -> "FakeModel":
        return self

    limits = session

    def load_adapter(self, name: str, _: Path) -> None:
        self.machine.loads.append(f"{self.name}:{name}")
        self.machine.wait(f"{self.name}:{name}")
        if f"{self.name}:{name}" in self.machine.failing:
            raise CheckpointError(f"/secret/{name} is broken")
        self.adapters.append(name)

    def unload_adapter(self, name: str) -> None:
        self.adapters.remove(name)

    @property
    def info(self) -> Any:
        return SimpleNamespace(weights_bytes=self.num_bytes)

    def close(self) -> None:
        self.closed = True
        self.machine.wait(self.name)
        self.machine.free(self)


@dataclass
class Machine:
    """Where the models run: how many of them, and how much they take together."""

    limit_bytes: int
    clock: float = 0.0
    failing: set[str] = field(default_factory=set)  # models that cannot be loaded
    slow: dict[str, float] = field(default_factory=dict)  # seconds of a load or an end
    held: dict[str, threading.Event] = field(default_factory=dict)  # ... until it may go on
    loads: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    there: dict[str, FakeModel] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def wait(self, name: str) -> None:
        time.sleep(self.slow.get(name, 0.0))
        if name in self.held:
            assert self.held[name].wait(60)

    def hold(self, name: str) -> threading.Event:
        """Loads and ends of a model wait for the event from now on."""
        self.held[name] = threading.Event()
        return self.held[name]

    def load(self, name: str, num_bytes: int, kv_bytes: int) -> FakeModel:
        model = FakeModel(name, num_bytes, self)
        with self.lock:
            self.loads.append(name)
            if name in self.there:
                self.problems.append(f"two of {name}")
            self.there[name] = model
            taken = sum(m.num_bytes + kv_bytes for m in self.there.values())
            if taken > self.limit_bytes:
                self.problems.append(f"{taken} bytes")
        self.wait(name)
        if name in self.failing:
            self.free(model)
            raise CheckpointError(f"/secret/{name} is broken")
        return model

    def free(self, model: FakeModel) -> None:
        with self.lock:
            del self.there[model.name]

    def entry(self, name: str, num_bytes: int, kv_bytes: int = MB, **fields: Any) -> RegistryEntry:
        def load(_: int) -> Any:
            return self.load(name, num_bytes, kv_bytes)

        return RegistryEntry(
            name=name, load=load, weights_bytes=num_bytes, kv_bytes=kv_bytes, **fields
        )

    def registry(self, entries: Iterable[RegistryEntry]) -> ModelRegistry:
        return ModelRegistry(list(entries), limit_bytes=self.limit_bytes, clock=lambda: self.clock)
