"""Caches that a model keeps by itself: one object for each running sequence, by slot.

What the objects hold only the model knows. A sequence begins without one, and its object goes when
the sequence leaves its slot; it can neither be shared nor go back.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from ..core import OwnCacheSpec
from .inputs import StepSegments


class OwnCache(Protocol):
    """The caches of one sequence, all layers together."""

    @property
    def num_bytes(self) -> int:
        """Bytes of their arrays."""
        ...

    def unread(self) -> Sequence[mx.array]:
        """Arrays that the last step made and no output of it depends on."""
        ...


class OwnPart:
    """The tokens of one sequence in a step.

    Attributes:
        rows: of the step's flat list.
        cache: of the sequence, which the model replaces; None: the sequence begins.
    """

    __slots__ = ("_pool", "_slot", "rows")

    def __init__(self, pool: "OwnCachePool", slot: int, rows: slice) -> None:
        self._pool = pool
        self._slot = slot
        self.rows = rows

    @property
    def cache(self) -> OwnCache | None:
        """The caches of the sequence; None: it begins."""
        return self._pool.caches.get(self._slot)

    @cache.setter
    def cache(self, cache: OwnCache) -> None:
        self._pool.caches[self._slot] = cache


class OwnStep:
    """What the model sees of a step.

    Attributes:
        parts: in the order of the flat list, which they cover.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: list[OwnPart]) -> None:
        self.parts = parts


class OwnCachePool:
    """The caches of all running sequences."""

    def __init__(self, spec: OwnCacheSpec) -> None:
        self.num_bytes = spec.num_bytes
        self.caches: dict[int, OwnCache] = {}  # by slot
        self._stepped: list[int] = []  # slots of the last step

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all arrays."""
        return sum(cache.num_bytes for cache in self.caches.values())

    def reset(self) -> None:
        """Forget the caches of all sequences."""
        self.caches, self._stepped = {}, []

    def begin_step(self, segments: StepSegments) -> OwnStep:
        """What the model sees of a step."""
        places = [  # first row, tokens, slot
            place
            for some in segments.short
            for place in zip(
                some.rows.tolist(), some.counts.tolist(), some.slots.tolist(), strict=True
            )
        ]
        places += [(s.row, s.num_tokens, s.slot) for s in segments.long]
        self._stepped = [slot for _, _, slot in places]
        return OwnStep(
            [OwnPart(self, slot, slice(row, row + count)) for row, count, slot in sorted(places)]
        )

    def outputs(self) -> list[mx.array]:
        """Arrays to be evaluated with the last step."""
        caches = [self.caches[slot] for slot in self._stepped if slot in self.caches]
        return [array for cache in caches for array in cache.unread()]

    def leave(self, slots: Iterable[int]) -> None:
        """Forget the caches of slots."""
        for slot in slots:
            self.caches.pop(slot, None)

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """No token can be taken back: no step of such a model may verify any."""
        assert not num_kept, "proposals to a model that keeps caches of its own"
