"""Weights of a model with experts that stay in their files; see expert_store.py.

A family builds the model as it always does. Stacks of experts become projections over slots that
are not there yet, and mixtures become streamed ones: how many slots each layer gets is known when
all are. No byte of an expert is read until then.
"""

import fcntl
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import InsufficientMemoryError, UnsupportedModelError
from ..layers.cpu import WideExperts
from ..layers.factory import LayerFactory
from ..layers.moe import ExpertProjection, MoE
from ..layers.streamed_moe import SlotProjection, StreamedMoE
from ..memory import human_bytes
from .expert_store import READS_AT_ONCE, ExpertStore, LayerExperts, Reader, SlotArray
from .language import reachable
from .matrix import StoredMatrix
from .safetensors import Span, unreadable
from .tensors import FLOATS, FileTensor, Tensor
from .weights import Weights

LEAST_RATE = 0.5  # tokens/s below which a model is refused
SAMPLE_BYTES, SAMPLE_S = 256 << 20, 0.25  # that measuring a disk reads and takes, at most
SAMPLE_READ = 1 << 20  # bytes of a read of these
FIELDS = ("weight", "scales", "biases", "bias")


def never(stored: StoredMatrix) -> ExpertProjection:
    """Of a stack that no weights have noted."""
    raise AssertionError("a stack of experts without weights")


@dataclass(frozen=True, slots=True)
class ExpertsInFiles(StoredMatrix):
    """One matrix per expert, which stays in its files.

    Attributes:
        defer: makes a projection over slots of it.
    """

    defer: Callable[[StoredMatrix], ExpertProjection] = never

    def expert_projection(self, make: LayerFactory) -> ExpertProjection:
        """The layer of one matrix per expert, over slots."""
        return self.defer(self)


class StreamedWeights(Weights):
    """Weights of which the stacks of experts are not read. Arguments as of `Weights`."""

    def __init__(self, tensors: dict[str, FileTensor], **options: Any) -> None:
        super().__init__(tensors, **options)
        self._is_stack = False  # what is taken now is one of experts
        self._stored: defaultdict[str, set[str]] = defaultdict(set)  # of one mixture, by field
        self._deferred: dict[SlotProjection, StoredMatrix] = {}
        self._mixtures: list[tuple[StreamedMoE, list[SlotProjection]]] = []

    def matrix(
        self,
        path: str,
        shape: tuple[int, ...],
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> StoredMatrix:
        """As of `Weights`; a stack of matrices stays in its files."""
        if len(shape) < 3:
            return super().matrix(path, shape, bias=bias, parts=parts)
        self._is_stack = True
        try:
            return self._in_files(super().matrix(path, shape, bias=bias, parts=parts))
        finally:
            self._is_stack = False

    def experts(
        self, stack: str, each: str, shape: tuple[int, int, int], **options: Any
    ) -> StoredMatrix:
        """As of `Weights`, in their files."""
        self._is_stack = True
        try:
            return self._in_files(super().experts(stack, each, shape, **options))
        finally:
            self._is_stack = False

    def _taken(self, name: str, shape: Sequence[int], parts: Sequence[int] | None) -> Tensor:
        """As of `Weights`; of experts, the dtypes of each field are noted."""
        tensor = super()._taken(name, shape, parts)
        if self._is_stack:
            self._stored[name.rpartition(".")[2]].add(FLOATS[tensor.dtype])
        return tensor

    def _cast(self, tensor: Tensor) -> Tensor:
        """Experts are rounded when they are read."""
        return tensor if self._is_stack else super()._cast(tensor)

    def _in_files(self, stored: StoredMatrix) -> StoredMatrix:
        fields = {name: getattr(stored, name) for name in (*FIELDS, "form")}
        return ExpertsInFiles(**fields, defer=self._defer)

    def _defer(self, stored: StoredMatrix) -> ExpertProjection:
        projection = SlotProjection()
        self._deferred[projection] = stored
        return projection

    def moe(self, **parts: Any) -> MoE:
        """A mixture with experts that are read when tokens need them.

        Raises:
            UnsupportedModelError: the files do not hold each expert in one piece.
        """
        projections = parts["gate_up_proj"], parts["down_proj"]
        found = list(dict.fromkeys(reachable(list(projections), SlotProjection)))
        whole = [one for one in found if isinstance(self._deferred[one].weight, FileTensor)]
        if not found or len(whole) < len(found) or list(reachable(list(projections), mx.array)):
            raise UnsupportedModelError(
                "expert_memory reads experts as they are in the files, and this checkpoint has "
                f"them {self._why_not()}: convert it first (`mlxinfer convert MODEL OUT "
                "--split-experts`), and run what is in OUT."
            )
        self._stored.clear()
        mixture = StreamedMoE(**parts)
        self._mixtures.append((mixture, found))
        return mixture

    def _why_not(self) -> str:
        """How experts are stored that cannot be read one by one."""
        mixed = [sorted(dtypes) for dtypes in self._stored.values() if len(dtypes) > 1]
        return f"partly in {' and '.join(mixed[0])}" if mixed else "transposed or interleaved"

    # -- once the model is built ----------------------------------------------------------------

    def open_experts(self, num_bytes: int, *, per_token: int, forced: bool) -> ExpertStore:
        """Give every mixture its slots.

        Args:
            num_bytes: of all slots together, at most.
            per_token: experts that a token goes to.
            forced: tokens may take as long as they do.

        Raises:
            UnsupportedModelError: the model has no experts.
            InsufficientMemoryError: so few bytes, or so slow a disk, that it makes no sense.
        """
        if not self._mixtures:
            raise UnsupportedModelError(
                "expert_memory is for mixtures of experts, and this model has none: leave it out."
            )
        sizes = [sum(map(self._expert_bytes, found)) for _, found in self._mixtures]
        counts = [self._deferred[found[0]].weight.shape[0] for _, found in self._mixtures]
        all_bytes = sum(size * count for size, count in zip(sizes, counts, strict=True))
        slots = [min(count * num_bytes // all_bytes, count) for count in counts]
        self._require_room(slots, sizes, counts, num_bytes, per_token)
        spans = [
            span
            for _, found in self._mixtures
            for span in self._deferred[found[0]].weight.spans  # type: ignore[union-attr]  # see `moe`
        ]
        active, rate = per_token * sum(sizes), disk_rate(spans)
        if not forced:
            _require_rate(active, min(num_bytes / all_bytes, 1.0), rate)
        reader, layers = Reader(), []
        for index, (mixture, found) in enumerate(self._mixtures):
            arrays = [array for one in found for array in self._fill(one, slots[index])]
            first = index == 0
            experts = LayerExperts(arrays, counts[index], per_token, reader, counts_tokens=first)
            mixture.slots = experts
            layers.append(experts)
        for (mixture, _), (following, _) in zip(self._mixtures, self._mixtures[1:], strict=False):
            mixture.following = following
        used = sum(size * count for size, count in zip(sizes, slots, strict=True))
        self._deferred.clear()
        return ExpertStore(layers, reader, used, all_bytes, active, rate)

    def _slot_dtypes(self, tensor: Tensor, stored: StoredMatrix) -> tuple[mx.Dtype, mx.Dtype]:
        """What a field's numbers are rounded to, and are held as: floats as the activations are.

        MLX's CPU backend has products of dense experts in float32 alone.
        """
        if tensor.dtype not in FLOATS:
            return tensor.dtype, tensor.dtype
        wide = stored.form is None and not mx.metal.is_available()
        return self.dtype, mx.float32 if wide else self.dtype

    def _expert_bytes(self, projection: SlotProjection) -> int:
        """Memory of one expert's part of a projection."""
        stored = self._deferred[projection]
        fields = [getattr(stored, name) for name in FIELDS]
        return sum(
            prod(tensor.shape[1:]) * self._slot_dtypes(tensor, stored)[1].size
            for tensor in fields
            if tensor is not None
        )

    def _fill(self, projection: SlotProjection, num_slots: int) -> list[SlotArray]:
        """Make a projection over empty slots; returns its fields."""
        stored, arrays = self._deferred[projection], {}
        for name in FIELDS:
            tensor = getattr(stored, name)
            if tensor is not None:
                dtypes = self._slot_dtypes(tensor, stored)
                arrays[name] = SlotArray(tensor, *dtypes, num_slots)
        slots = {name: array.array for name, array in arrays.items()}
        over = StoredMatrix(
            slots["weight"],
            slots.get("bias"),
            slots.get("scales"),
            slots.get("biases"),
            stored.form,
        )
        # Slots change in place, so no form that has the numbers in another order may be made.
        made = over.expert_projection(LayerFactory())
        wide = stored.form is None and self.dtype != arrays["weight"].array.dtype
        projection.over_slots = WideExperts(made) if wide else made
        mx.eval(list(reachable(made, mx.array)))
        return list(arrays.values())

    def _require_room(
        self,
        slots: Sequence[int],
        sizes: Sequence[int],
        counts: Sequence[int],
        num_bytes: int,
        per_token: int,
    ) -> None:
        """Raise InsufficientMemoryError unless every layer has slots for a token's experts."""
        least = max(per_token, 2)
        if min(slots) >= least:
            return
        all_bytes = sum(size * count for size, count in zip(sizes, counts, strict=True))
        needed = -(-least * all_bytes // min(counts))
        raise InsufficientMemoryError(
            f"expert_memory is {human_bytes(num_bytes)}, which holds {min(slots)} of the "
            f"{min(counts)} experts of a layer, and a token goes to {per_token}: give it "
            f"{human_bytes(1.05 * needed)} or more.",
            param="expert_memory",
        )


def _require_rate(active_bytes: int, share: float, rate: float) -> None:
    """Raise InsufficientMemoryError where tokens would take seconds.

    Args:
        active_bytes: of the experts that a token goes to.
        share: of all experts, that has slots; so many of them are there if routing is even.
        rate: bytes/s of the disk.
    """
    missing = active_bytes * (1 - share)
    if missing <= rate / LEAST_RATE:
        return
    raise InsufficientMemoryError(
        f"A token goes to {human_bytes(active_bytes)} of experts, of which expert_memory holds "
        f"{share:.0%}; the disk was measured at {human_bytes(int(rate))}/s, which makes "
        f"{rate / missing:.2f} tokens/s where routing is even. Less than {LEAST_RATE} is refused: "
        "give it more expert_memory, take fewer bits, or say slow_experts=True (--slow-experts).",
        param="expert_memory",
    )


def disk_rate(spans: Sequence[Span]) -> float:
    """Bytes/s of the disk that spans lie on, read in parts all over them, past the page cache.

    `READS_AT_ONCE` readers for `SAMPLE_S` seconds. Where the system does not let reads pass its
    cache, and for files that were just read, it is the cache's rate.

    Raises:
        CheckpointError: a file is not there any more, or its disk fails.
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
    """Let the read of a part pass the page cache, where the file system has that."""
    with suppress(OSError):
        if sys.platform == "darwin":
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
        else:
            os.posix_fadvise(file, start, SAMPLE_READ, os.POSIX_FADV_DONTNEED)
