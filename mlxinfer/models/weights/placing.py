"""Where a model's tensors go: memory, slots for experts that stay in their files, or nowhere.

With slots, a family builds the model as it always does. Stacks of experts become projections over
slots that do not exist yet, and mixtures become streamed ones. The number of slots of a layer is
known only when all layers are built. No byte of an expert is read before that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import mlx.core as mx

from ...errors import InsufficientMemoryError, UnsupportedModelError
from ...layers.moe import ExpertProjection, MoE
from ...layers.streamed_moe import SlotProjection, StreamedMoE
from ...memory import human_bytes
from ..language import reachable
from .expert_store import ExpertStore, LayerExperts, Reader, SlotArray, disk_rate
from .matrix import StoredMatrix
from .tensors import FLOATS, FileTensor, Tensor, cast, loaded

LEAST_RATE = 0.5  # tokens/s below which a model is refused
FIELDS = ("weight", "scales", "biases", "bias")


class InMemory:
    """Everything is read and computed while the model is built."""

    def tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def rounded(self, name: str, tensor: Tensor, dtype: mx.Dtype, *, of_experts: bool) -> Tensor:
        """Return a field of a matrix in the activations' dtype.

        Args:
            of_experts: the matrix belongs to one expert, or to all of them.
        """
        return cast(tensor, dtype)

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors are equal bit for bit."""
        return one.shape == other.shape and bool(mx.array_equal(loaded(one), loaded(other)))

    def experts(self, stored: StoredMatrix) -> StoredMatrix:
        """Return experts' matrices (E, out_dims, in_dims) as they are used from now on."""
        return stored

    def mixture(self, **parts: Any) -> MoE:
        return MoE(**parts)

    def compute(self, arrays: Sequence[mx.array]) -> None:
        mx.eval(arrays)


class Nowhere(InMemory):
    """Tensors are shapes: no byte is read or computed. For checks, and layers of other stages."""

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return an array of its shape that is never computed."""
        return mx.zeros(tensor.shape, tensor.dtype)

    def rounded(self, name: str, tensor: Tensor, dtype: mx.Dtype, *, of_experts: bool) -> Tensor:
        return mx.zeros(tensor.shape, dtype)

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors have one shape."""
        return one.shape == other.shape

    def compute(self, arrays: Sequence[mx.array]) -> None:
        """Compute nothing."""


IN_MEMORY = InMemory()
NOWHERE = Nowhere()


class InSlots(InMemory):
    """Experts stay in their files until tokens need them; everything else is as in memory."""

    def __init__(self) -> None:
        self._dtypes: defaultdict[str, set[str]] = defaultdict(set)  # of one mixture, by field
        self._deferred: dict[SlotProjection, StoredMatrix] = {}
        self._mixtures: list[tuple[StreamedMoE, list[SlotProjection]]] = []
        self._dtype = mx.float32  # of activations

    def rounded(self, name: str, tensor: Tensor, dtype: mx.Dtype, *, of_experts: bool) -> Tensor:
        """Leave experts as they are stored: they are rounded when they are read."""
        if not of_experts:
            return cast(tensor, dtype)
        self._dtypes[name].add(FLOATS[tensor.dtype])
        return tensor

    def experts(self, stored: StoredMatrix) -> StoredMatrix:
        """Leave them in their files; the layer made of them reads slots."""
        return replace(stored, defer=self._defer)

    def _defer(self, stored: StoredMatrix) -> ExpertProjection:
        projection = SlotProjection()
        self._deferred[projection] = stored
        return projection

    def mixture(self, **parts: Any) -> MoE:
        """A mixture with experts that are read when tokens need them."""
        projections = parts["gate_up_proj"], parts["down_proj"]
        in_slots = list(dict.fromkeys(reachable(list(projections), SlotProjection)))
        whole = [one for one in in_slots if isinstance(self._deferred[one].weight, FileTensor)]
        if (
            not in_slots
            or len(whole) < len(in_slots)
            or list(reachable(list(projections), mx.array))
        ):
            raise UnsupportedModelError(
                "expert_memory reads experts as they are in the files, and this checkpoint has "
                f"them {self._why_not()}: convert it first (`mlxinfer convert MODEL OUT "
                "--split-experts`), and run what is in OUT."
            )
        self._dtypes.clear()
        mixture = StreamedMoE(**parts)
        self._mixtures.append((mixture, in_slots))
        return mixture

    def _why_not(self) -> str:
        mixed = [sorted(dtypes) for dtypes in self._dtypes.values() if len(dtypes) > 1]
        return f"partly in {' and '.join(mixed[0])}" if mixed else "transposed or interleaved"

    def open_experts(
        self, num_bytes: int, *, dtype: mx.Dtype, per_token: int, forced: bool
    ) -> ExpertStore:
        """Give every mixture its slots, once the model is built.

        Args:
            forced: accept a disk that makes tokens take seconds.

        Raises:
            UnsupportedModelError: the model has no experts.
            InsufficientMemoryError: too few bytes, or too slow a disk.
        """
        self._dtype = dtype
        if not self._mixtures:
            raise UnsupportedModelError(
                "expert_memory is for mixtures of experts, and this model has none: leave it out."
            )
        sizes = [sum(map(self._expert_bytes, in_slots)) for _, in_slots in self._mixtures]
        counts = [self._deferred[in_slots[0]].weight.shape[0] for _, in_slots in self._mixtures]
        all_bytes = sum(size * count for size, count in zip(sizes, counts, strict=True))
        slots = [min(count * num_bytes // all_bytes, count) for count in counts]
        self._require_room(slots, sizes, counts, num_bytes, per_token)
        spans = [
            span
            for _, in_slots in self._mixtures
            for span in self._deferred[in_slots[0]].weight.spans  # type: ignore[union-attr]  # see `moe`
        ]
        active, rate = per_token * sum(sizes), disk_rate(spans)
        if not forced:
            _require_rate(active, min(num_bytes / all_bytes, 1.0), rate)
        reader, layers = Reader(), []
        for index, (mixture, in_slots) in enumerate(self._mixtures):
            arrays = [array for one in in_slots for array in self._fill(one, slots[index])]
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
        """Return the dtypes that a field's numbers are rounded to, and are held in.

        Floats take the dtype of activations. MLX's CPU backend multiplies dense experts in float32
        only.
        """
        if tensor.dtype not in FLOATS:
            return tensor.dtype, tensor.dtype
        wide = stored.form is None and not mx.metal.is_available()
        return self._dtype, mx.float32 if wide else self._dtype

    def _expert_bytes(self, projection: SlotProjection) -> int:
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
        projection.over_slots = made = over.expert_projection()
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
    """Raise InsufficientMemoryError if tokens would take seconds.

    Args:
        share: part of all experts that has slots. With even routing, this part of a token's experts
            is in memory.
    """
    missing = active_bytes * (1 - share)
    if missing <= rate / LEAST_RATE:
        return
    raise InsufficientMemoryError(
        f"A token goes to {human_bytes(active_bytes)} of experts; expert_memory holds "
        f"{share:.0%}; the disk was measured at {human_bytes(int(rate))}/s, which makes "
        f"{rate / missing:.2f} tokens/s where routing is even. Less than {LEAST_RATE} is refused: "
        "give it more expert_memory, take fewer bits, or say slow_experts=True (--slow-experts).",
        param="expert_memory",
    )
