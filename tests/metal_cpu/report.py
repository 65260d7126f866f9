"""What one dispatch did: faults and traffic. Knows no compiler and no MLX."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Size = tuple[int, int, int]


class KernelStopped(AssertionError):
    """An unchecked kernel could not go on: its threads wait at different places."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a kernel must not do.

    `kind` is one of: address space, array bounds, divergence, language, limit, misaligned,
    out of bounds, race, shuffle, undefined, uninitialised read, unwritten output, write to input.
    """

    kind: str
    message: str
    file: str  # of the source: the .metal file, or "body" for the text around the call
    line: int  # 0: not of one place
    times: int = 1

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else ""
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{place}{self.kind}: {self.message}{often}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a dispatch moved between a buffer and registers.

    Attributes:
        requested_bytes: of all loads of all threads.
        requested_once_per_simdgroup_bytes: the same, but an address that several lanes of a
            SIMD-group load by the same instruction at the same turn counts once.
        unique_per_threadgroup_bytes: bytes that a threadgroup loads at least once, summed over
            threadgroups: the traffic of DRAM if only threads of one threadgroup share a cache.
        unique_bytes: bytes that are loaded at least once.
        stored_bytes: of all stores.
        num_loads, num_stores: instructions of single threads.
    """

    requested_bytes: int = 0
    requested_once_per_simdgroup_bytes: int = 0
    unique_per_threadgroup_bytes: int = 0
    unique_bytes: int = 0
    stored_bytes: int = 0
    num_loads: int = 0
    num_stores: int = 0


@dataclass(slots=True)
class Report:
    """One dispatch. An unchecked one has counts, but neither faults nor traffic."""

    kernel: str
    grid: Size  # threads
    threadgroup: Size  # threads
    faults: list[Fault] = field(default_factory=list)
    buffers: dict[str, Traffic] = field(default_factory=dict)  # by parameter name
    threadgroup_bytes: int = 0  # threadgroup memory of one threadgroup, at most
    num_threadgroups: int = 0
    num_threads: int = 0
    num_simd_ops: int = 0  # of whole SIMD-groups
    num_simdgroup_barriers: int = 0
    num_threadgroup_barriers: int = 0  # of whole threadgroups
    threadgroup_memory: Traffic = field(default_factory=Traffic)
    bank_ways: int = 0  # the worst access to threadgroup memory: 1 where no bank is asked twice
    bank_place: str = ""  # file and line of it

    def kinds(self) -> set[str]:
        """Kinds of the faults."""
        return {fault.kind for fault in self.faults}

    def total(self, names: Iterable[str]) -> Traffic:
        """The traffic of several buffers together."""
        chosen = [self.buffers[name] for name in names]
        fields = Traffic.__dataclass_fields__
        return Traffic(**{name: sum(getattr(t, name) for t in chosen) for name in fields})
