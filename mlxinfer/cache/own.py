"""Caches that a model keeps by itself: one object for each running sequence, by slot.

What the objects hold only the model knows. A sequence begins without one, and its object goes when
the sequence leaves its slot; it can neither be shared nor go back.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from ..config import KVOptions
from ..core import OwnCacheSpec
from ..errors import InvalidRequestError
from .inputs import CacheWork, StepMetadata
from .paged import Formats, TailPlace
from .state import SequenceGroup, SequenceLayer


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

    __slots__ = ("_caches", "_slot", "rows")

    def __init__(self, caches: dict[int, OwnCache], slot: int, rows: slice) -> None:
        self._caches = caches
        self._slot = slot
        self.rows = rows

    @property
    def cache(self) -> OwnCache | None:
        """The caches of the sequence; None: it begins."""
        return self._caches.get(self._slot)

    @cache.setter
    def cache(self, cache: OwnCache) -> None:
        self._caches[self._slot] = cache


class OwnLayer(SequenceLayer):
    """What the model sees of a step: one object stands for all of its layers.

    Attributes:
        parts: in the order of the flat list, which they cover.
    """

    def __init__(self, spec: OwnCacheSpec, formats: Formats, dtype: mx.Dtype) -> None:
        self.spec, self.formats = spec, formats
        self.token_bytes = spec.numbers * dtype.size
        self.state_bytes = spec.num_bytes
        self.parts: list[OwnPart] = []

    @classmethod
    def of(cls, spec: OwnCacheSpec, formats: Formats, dtype: mx.Dtype) -> "OwnLayer":
        """The caches of a model whose activations are of `dtype`."""
        return cls(spec, formats, dtype)

    @staticmethod
    def windowed(spec: OwnCacheSpec, options: KVOptions) -> OwnCacheSpec:
        """Raise InvalidRequestError where a window is asked for."""
        if options.window is not None:
            raise _not_paged("kv_window")
        return spec

    @staticmethod
    def check(spec: OwnCacheSpec, formats: Formats, *, key_bias: bool) -> None:
        """Raise InvalidRequestError: other formats are asked for than the model's own."""
        raise _not_paged("kv_bits")

    def make_group(self, layers: "Sequence[OwnLayer]", snapshot_bytes: int) -> "OwnCacheGroup":
        """As of `SequenceLayer`: it has no snapshots."""
        return OwnCacheGroup(layers)


def _not_paged(asked: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{asked} is for models with keys and values in pages; this one keeps caches of its own. "
        f"Leave {asked} out.",
        param=asked,
    )


class OwnCacheGroup(SequenceGroup):
    """The caches of all running sequences."""

    def __init__(self, layers: Sequence[OwnLayer]) -> None:
        assert len(layers) == 1, "caches of its own are those of a whole model"
        super().__init__(layers[0].state_bytes, max_snapshots=0)
        (self._layer,) = layers
        self.reset()

    def reset(self) -> None:
        """Forget the caches of all sequences."""
        self._caches: dict[int, OwnCache] = {}  # by slot
        self._stepped: list[int] = []  # slots of the last step

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all arrays."""
        return sum(cache.num_bytes for cache in self._caches.values())

    def begin_step(self, metadata: StepMetadata, place: TailPlace) -> None:
        """Let the model see a step."""
        places = [  # first row, tokens, slot
            place
            for some in metadata.short
            for place in zip(
                some.rows.tolist(), some.counts.tolist(), some.slots.tolist(), strict=True
            )
        ]
        places += [(s.row, s.num_tokens, s.slot) for s in metadata.long]
        self._stepped = [slot for _, _, slot in places]
        self._layer.parts = [
            OwnPart(self._caches, slot, slice(row, row + count))
            for row, count, slot in sorted(places)
        ]

    def step_outputs(self) -> list[mx.array]:
        """Arrays to be evaluated with the last step."""
        caches = [self._caches[slot] for slot in self._stepped if slot in self._caches]
        return [array for cache in caches for array in cache.unread()]

    def take_back(self, num_kept: Mapping[int, int]) -> None:
        """No token can be taken back: no step of such a model may verify any."""
        assert not num_kept, "proposals to a model that keeps caches of its own"

    def before_step(self, work: CacheWork) -> None:
        """Nothing: there are no snapshots."""
        assert not work.save

    def after_load(self, work: CacheWork, reused: Sequence[int]) -> None:
        """Forget the caches of sequences that leave."""
        for slot in work.leave:
            self._caches.pop(slot, None)
