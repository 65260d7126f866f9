"""Experts that stay in their files, and slots of memory for the experts that tokens use.

The budget is a share of all experts, and each layer has that share of its experts in slots. If an
expert is needed and missing, it takes the slot of the expert that tokens use most rarely. This rate
is a running mean: after N tokens the past counts FORGET to the N. In simulated routing (popular
experts, topics, the last token's; 1/8 to 1/2 of the experts in memory) 1 to 8 in a hundred more
experts are found in memory than by the least recently used rule. Slots for each layer find as many
experts as one pool for all layers, or more, unless there are few slots and some experts are very
popular.

Reads go to threads, so that many are under way at once. Parts of an expert that lie side by side in
a file are one read. Only the engine's thread decides; readers fill memory that it gave them.
"""

import fcntl
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .files import Span, WeightFile, unreadable
from .tensors import FileTensor, Tensor

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]

FORGET = 0.97  # of what is known of the past, left after each token
READS_AT_ONCE = 16
SAMPLE_BYTES, SAMPLE_S = 256 << 20, 0.25  # upper limits of measuring a disk
SAMPLE_READ = 1 << 20  # bytes of one of its reads


@dataclass(slots=True)
class Counters:
    """Counts over all layers of a model."""

    tokens: int = 0  # rows of all steps
    hits: int = 0  # experts of a layer and step that were in memory, or on their way there
    misses: int = 0
    reads: int = 0  # calls
    bytes_read: int = 0
    guessed: int = 0  # experts that were read by a guess
    guessed_right: int = 0  # of these, those that the next step of their layer needed
    stall_s: float = 0.0  # that layers waited for reads
    waves: int = 0  # of steps that needed more experts than there are slots

    def as_dict(self) -> dict[str, Any]:
        wanted = self.hits + self.misses
        return asdict(self) | {
            "hit_rate": round(self.hits / wanted, 4) if wanted else 0.0,
            "bytes_per_token": self.bytes_read // self.tokens if self.tokens else 0,
            "stall_s": round(self.stall_s, 6),
        }


class SlotArray:
    """One field of the experts' matrices: all of it in files or memory, some of it in slots.

    Args:
        source: (E, ...) of all experts.
        dtype: what numbers are rounded to when they are read.
        held: dtype of the slots, which holds all of those.

    Attributes:
        array: (num_slots, ...).
        spans: where each expert's numbers lie; none where `source` is in memory.
    """

    def __init__(self, source: Tensor, dtype: mx.Dtype, held: mx.Dtype, num_slots: int) -> None:
        self.array = mx.zeros((num_slots, *source.shape[1:]), held)
        mx.eval(self.array)
        # MLX's memory is also the host's. Readers write to it while no product reads the slot.
        self._slots = host_bytes(self.array)
        self.spans: list[list[Span]] = []
        self._dtypes, self._memory = (source.dtype, dtype, held), None
        if isinstance(source, FileTensor):
            self.spans = source.rows()
        else:
            self._memory = source.astype(dtype).astype(held)
            mx.eval(self._memory)

    @property
    def slot_bytes(self) -> int:
        return self._slots.shape[1]

    def targets(self, expert: int, slot: int) -> "list[Target]":
        """The reads for an expert. Fields that are in memory are copied at once."""
        if self._memory is not None:
            self._slots[slot] = host_bytes(self._memory)[expert]
            return []
        at, targets = 0, []
        ratio = self.array.dtype.size / self._dtypes[0].size
        for span in self.spans[expert]:
            end = at + int(span.size * ratio)
            targets.append(Target(span, self._slots[slot, at:end], self._dtypes))
            at = end
        return targets


def host_bytes(array: mx.array) -> Bytes:
    """The memory of an array (N, ...) that is computed, as (N, bytes of one); not a copy."""
    flat = np.frombuffer(memoryview(array), np.uint8)  # type: ignore[arg-type]  # it is a buffer
    return flat.reshape(len(array), -1)


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes of a file and the memory that they are for."""

    span: Span
    memory: Bytes
    dtypes: tuple[mx.Dtype, mx.Dtype, mx.Dtype]  # stored, rounded to, held

    def buffer(self) -> Bytes:
        if len(set(self.dtypes)) == 1:
            return self.memory
        return np.empty(self.span.size, np.uint8)

    def take(self, buffer: Bytes) -> None:
        stored, dtype, held = self.dtypes
        if len(set(self.dtypes)) > 1:
            self.memory[:] = rounded(rounded(buffer, stored, dtype), dtype, held)


def rounded(numbers: Bytes, stored: mx.Dtype, dtype: mx.Dtype) -> Bytes:
    """Bytes of floats of one dtype as bytes of another, rounded to the nearest, ties to even."""
    if stored == dtype:
        return numbers
    if stored == mx.bfloat16:
        wide = (numbers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = numbers.view(np.float16 if stored == mx.float16 else np.float32).astype(np.float32)
    if dtype == mx.float16:
        return wide.astype(np.float16).view(np.uint8)
    if dtype == mx.float32:
        return wide.view(np.uint8)
    bits = wide.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16).view(np.uint8)


class Reader:
    """Threads that read experts.

    Attributes:
        unread: computed from the slots of the layer that ran last, perhaps not yet; None: nothing.
    """

    def __init__(self) -> None:
        # Its threads end when the last layer goes that has it.
        self._threads = ThreadPoolExecutor(READS_AT_ONCE, "mlxinfer-experts")
        self.counters = Counters()
        self.unread: mx.array | None = None

    def settle(self) -> None:
        """Wait until everything computed from slots is done, and drop the references to it."""
        unread, self.unread = self.unread, None
        mx.eval(unread)

    def begin(self, reading: "Reading", targets: Sequence[Target], num_experts: int) -> None:
        runs = adjacent(targets)
        num_jobs = min(len(runs), -(-READS_AT_ONCE // num_experts))
        self.counters.reads += len(runs)
        self.counters.bytes_read += sum(target.span.size for target in targets)
        for i in range(num_jobs):
            reading.futures.append(self._threads.submit(read_runs, runs[i::num_jobs]))


def adjacent(targets: Iterable[Target]) -> list[list[Target]]:
    runs: list[list[Target]] = []
    end: tuple[WeightFile, int] | None = None
    for target in sorted(targets, key=lambda read: (str(read.span.file.path), read.span.start)):
        span = target.span
        if end == (span.file, span.start):
            runs[-1].append(target)
        else:
            runs.append([target])
        end = span.file, span.start + span.size
    return runs


def read_runs(runs: Sequence[Sequence[Target]]) -> None:
    """Fill the targets of runs, one after another; raises what `WeightFile.read_into` raises."""
    for run in runs:
        buffers = [target.buffer() for target in run]
        file, start = run[0].span.file, run[0].span.start
        file.read_into([buffer.data for buffer in buffers], start)
        for target, buffer in zip(run, buffers, strict=True):
            target.take(buffer)


@dataclass(slots=True)
class Reading:
    """An expert that is on its way into its slot."""

    guessed: bool
    futures: list[Future[None]] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        return any(future.running() or future.done() for future in self.futures)

    def stop(self) -> None:
        """Return when none of its reads is under way or will be."""
        for future in self.futures:
            future.cancel()
        wait(self.futures)


class LayerExperts:
    """The experts of one layer, some in slots; `Slots` of layers/streamed_moe.py.

    Args:
        num_experts, per_token: E, and those that a token goes to.
        counts_tokens: it is the first layer that has experts.
    """

    def __init__(
        self,
        arrays: Sequence[SlotArray],
        num_experts: int,
        per_token: int,
        reader: Reader,
        *,
        counts_tokens: bool,
    ) -> None:
        self._arrays = arrays
        self._per_token = per_token
        self._reader = reader
        self._counts_tokens = counts_tokens
        self._reading: dict[int, Reading] = {}
        self._step = 0
        self._slot_of = np.full(num_experts, -1, np.int32)
        self._expert_in = np.full(len(arrays[0].array), -1, np.int32)
        self._rate = np.zeros(num_experts)  # of tokens that go to each expert
        self._last_step = np.full(num_experts, -1)  # that needed it

    @property
    def num_slots(self) -> int:
        return len(self._expert_in)

    def route(self, experts: Ints) -> Ints:
        """Note which experts (N, k) rows go to; returns them, those in memory first."""
        # Routers read what earlier layers gave: that is computed by now, and not held any longer.
        self._reader.settle()
        num_tokens = experts.size // self._per_token
        counts = np.bincount(experts.ravel(), minlength=len(self._rate))
        past = FORGET**num_tokens
        self._rate = past * self._rate + (1 - past) / num_tokens * counts
        self._step += 1
        self._last_step[counts > 0] = self._step
        wanted = np.flatnonzero(counts).astype(np.int32)
        self._drop_wrong_guesses(set(wanted.tolist()))
        missing = self._slot_of[wanted] < 0
        counters = self._reader.counters
        counters.tokens += num_tokens * self._counts_tokens
        counters.misses += int(missing.sum())
        counters.hits += int((~missing).sum())
        counters.waves += len(wanted) > self.num_slots
        return wanted[np.argsort(missing, kind="stable")]

    def _drop_wrong_guesses(self, wanted: set[int]) -> None:
        """Drop reads that would only be waited for, and those that failed: they begin again."""
        for expert, reading in list(self._reading.items()):
            failed = any(future.done() and future.exception() for future in reading.futures)
            if failed or (expert not in wanted and not reading.has_begun):
                reading.stop()
                self._forget(expert)
            elif expert in wanted:
                self._reader.counters.guessed_right += reading.guessed
            reading.guessed = False

    def begin(self, wanted: Ints, keep: Ints) -> None:
        missing = wanted[self._slot_of[wanted] < 0]
        if len(missing):
            self._fill(missing, np.concatenate([wanted, keep]), guessed=False)

    def finish(self, wanted: Ints) -> Ints:
        """Wait until they are read; the slot of each expert (E,), valid for `wanted` only."""
        under_way = [int(expert) for expert in wanted if int(expert) in self._reading]
        if under_way:
            began_s = time.monotonic()
            wait([future for expert in under_way for future in self._reading[expert].futures])
            self._reader.counters.stall_s += time.monotonic() - began_s
        errors = []
        for expert in under_way:
            for future in self._reading.pop(expert).futures:
                if (error := future.exception()) is not None:
                    errors.append(error)
                    self._forget(expert)
        if errors:
            raise errors[0]
        return self._slot_of

    def read_by(self, y: mx.array) -> None:
        """Nothing is written to slots from now on until `y` is computed."""
        self._reader.unread = y

    def expect(self, experts: Ints) -> None:
        """Read what a guess (N, k) names into slots of experts that the last step did not need."""
        counts = np.bincount(experts.ravel(), minlength=len(self._rate))
        is_here = self._slot_of >= 0
        missing = np.flatnonzero((counts > 0) & ~is_here)
        keep = np.flatnonzero(((counts > 0) | (self._last_step == self._step)) & is_here)
        room = (self.num_slots - len(keep)) // 2
        guess = missing[np.argsort(-counts[missing], kind="stable")][:room]
        if len(guess):
            self._reader.counters.guessed += len(guess)
            self._fill(guess.astype(np.int32), keep, guessed=True)

    def _fill(self, missing: Ints, keep: NDArray[Any], *, guessed: bool) -> None:
        self._reader.settle()
        victims = self._victims(len(missing), keep)
        for expert, slot in zip(missing.tolist(), victims, strict=True):
            if (before := int(self._expert_in[slot])) >= 0:
                if before in self._reading:
                    self._reading[before].stop()
                self._forget(before)
            self._slot_of[expert], self._expert_in[slot] = slot, expert
            reading = self._reading[expert] = Reading(guessed)
            try:
                targets = [t for array in self._arrays for t in array.targets(expert, slot)]
                self._reader.begin(reading, targets, len(missing))
            except BaseException:  # no thread, no memory: the slot holds nothing
                reading.stop()
                self._forget(expert)
                raise

    def _victims(self, count: int, keep: NDArray[Any]) -> list[int]:
        """Free slots first, then the slots of the experts that tokens use most rarely."""
        held = self._expert_in
        rates = np.where(held < 0, -1.0, self._rate[held])
        slots_in_use = self._slot_of[keep]
        rates[slots_in_use[slots_in_use >= 0]] = np.inf
        order = np.lexsort((self._last_step[held], rates))[:count]
        assert np.isfinite(rates[order]).all(), "more experts are kept than there are slots"
        slots: list[int] = order.tolist()
        return slots

    def _forget(self, expert: int) -> None:
        self._reading.pop(expert, None)
        if (slot := int(self._slot_of[expert])) >= 0:
            self._slot_of[expert] = self._expert_in[slot] = -1


@dataclass(frozen=True, slots=True)
class ExpertStore:
    """The experts of a model that are read when tokens need them."""

    layers: Sequence[LayerExperts]  # in their order
    reader: Reader
    slot_bytes: int  # memory of all slots
    num_bytes: int  # of all experts, in the files' layout
    active_bytes: int  # of those that one token goes to
    disk_rate: float  # bytes/s of the disk, measured when the model was loaded

    def stats(self) -> dict[str, Any]:
        return {
            "slots": sum(layer.num_slots for layer in self.layers),
            "slot_bytes": self.slot_bytes,
            "all_bytes": self.num_bytes,
            "active_bytes_per_token": self.active_bytes,
            "disk_bytes_per_s": round(self.disk_rate),
            **self.reader.counters.as_dict(),
        }


def disk_rate(spans: Sequence[Span]) -> float:
    """Bytes/s of the disk that spans lie on, read in parts all over them, past the page cache.

    `READS_AT_ONCE` readers for `SAMPLE_S` seconds. Where the system does not let reads pass its
    cache, and for files that were just read, it is the cache's rate.
    """
    parts = [
        (span.file.path, start)
        for span in spans
        for start in range(span.start, span.start + span.size, SAMPLE_READ)
    ]
    count = min(len(parts), SAMPLE_BYTES // SAMPLE_READ)
    chosen = [parts[i * len(parts) // count] for i in range(count)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(READS_AT_ONCE, "mlxinfer-disk-rate") as threads:
        total = sum(threads.map(lambda part: _sample(part, began_s), chosen))
    return max(total, 1) / max(time.monotonic() - began_s, 1e-6)


def _sample(part: tuple[Path, int], began_s: float) -> int:
    """Bytes that are read of a part, unless the time is over.

    Each part opens its file: a model has hundreds, and macOS lets a process open 256 by default.
    """
    path, start = part
    if time.monotonic() - began_s > SAMPLE_S:
        return 0
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            _pass_cache(file, start)
            return len(os.pread(file, SAMPLE_READ, start))
        finally:
            os.close(file)
    except OSError as error:
        raise unreadable(path, error) from error


def _pass_cache(file: int, start: int) -> None:
    with suppress(OSError):
        if sys.platform == "darwin":
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
        else:
            os.posix_fadvise(file, start, SAMPLE_READ, os.POSIX_FADV_DONTNEED)
