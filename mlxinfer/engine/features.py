"""Features of pictures: a tower computes them once, in slices between steps, and steps read them.

Features are kept by the picture's digest within a limit of bytes, the most recently used ones.
Requests of different salts share none. A picture whose tokens are all in the prefix cache needs
none. Otherwise the prompt waits. The scheduler asks which part of a prompt can be computed
(`available`), and so the wanted pictures become known. The loop gives the tower a slice of time
before each step, so running answers wait no longer than for a slice of a prompt. Tenants share the
tower: each piece of work is for the one that had the least of it.
"""

import math
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RequestFailedError, gpu_stopped, require_gpu
from ..fair import Shares, Tenant
from ..images import Picture
from ..models.towers import Features, Tower
from .batch import Batch, Sequence
from .queues import FeatureSource
from .runner import FeatureArrays

Key = tuple[str | None, bytes]
"""The salt of requests that share features, and the picture's digest."""


@dataclass(slots=True)
class KeptFeatures:
    """The features of one picture."""

    arrays: list[mx.array]  # (N, hidden) each, see `FeatureArrays`
    users: set[Sequence]  # running sequences that are still to compute tokens of it

    @property
    def num_bytes(self) -> int:
        return sum([array.nbytes for array in self.arrays])


@dataclass(slots=True)
class PictureCounts:
    """Counts since the engine started."""

    seen: int = 0  # passes of the tower that ended well
    failed: int = 0
    tower_s: float = 0.0


class PictureFeatures(FeatureSource):
    """Computes and keeps the features of pictures.

    Args:
        tower: of the model; None: it does not see, and no request has a picture.
        slice_s: seconds of a slice; None: one piece of the tower's pass.
        counts: of earlier features of the same engine, which go on.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        tower: Tower | None,
        *,
        dtype: mx.Dtype,
        max_bytes: int,
        slice_s: float | None = None,
        counts: PictureCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tower, self._dtype, self._max_bytes = tower, dtype, max_bytes
        self._slice_s, self._clock = slice_s, clock
        self._kept: OrderedDict[Key, KeptFeatures] = OrderedDict()  # last used last
        self.wanted: dict[Key, tuple[Picture, list[Sequence]]] = {}  # in order
        self._passes: dict[Key, Generator[mx.array, None, list[Features]]] = {}  # begun
        self._shares = Shares()  # of the tower's seconds
        self.counts = counts or PictureCounts()

    # -- for the scheduler ----------------------------------------------------------------------

    def available(self, sequence: Sequence, count: int) -> int:
        """How many of a sequence's next `count` tokens can be computed now.

        A chunk waits (0) for the features of all pictures in it. It ends before a picture that has
        no room beside those that running sequences still need.
        """
        pictures, start = sequence.pictures, sequence.num_computed
        if pictures is None:
            return count
        waits = False
        for rows in pictures.features(start, start + count):
            if not self._hold(rows.picture, sequence):
                count = int(rows.places[0]) - start
                break
            waits |= _key(rows.picture, sequence) not in self._kept
        return 0 if waits else count

    def release(self, sequence: Sequence) -> None:
        for features in self._kept.values():
            features.users.discard(sequence)
        for key, (_, waiting) in list(self.wanted.items()):
            if sequence in waiting:
                waiting.remove(sequence)
            if not waiting:
                del self.wanted[key]
                if key in self._passes:
                    self._passes.pop(key).close()

    def _hold(self, picture: Picture, sequence: Sequence) -> bool:
        """Keep features for a sequence, or let the tower compute them; False: there is no room."""
        key = _key(picture, sequence)
        features, wanted = self._kept.get(key), self.wanted.get(key)
        is_held = wanted is not None or (features is not None and len(features.users) > 0)
        if not is_held and self._bytes_of(picture) > self._max_bytes - self._bytes_held():
            return False
        if features is not None:
            features.users.add(sequence)
        elif wanted is None:
            self.wanted[key] = picture, [sequence]
        elif sequence not in wanted[1]:
            wanted[1].append(sequence)
        return True

    def _bytes_held(self) -> int:
        """Bytes of features that running sequences need, and of those that are being computed."""
        num_bytes = sum([features.num_bytes for features in self._kept.values() if features.users])
        return num_bytes + sum([self._bytes_of(picture) for picture, _ in self.wanted.values()])

    def _bytes_of(self, picture: Picture) -> int:
        assert self._tower is not None
        return picture.num_features * self._tower.width * self._dtype.size

    # -- for the loop ---------------------------------------------------------------------------

    def work(self, most_s: float = math.inf) -> tuple[Sequence, RequestFailedError] | None:
        """Give the tower one slice of time, for the pictures that were wanted first.

        Args:
            most_s: seconds of the slice, if it is shorter than usual; at least one piece is
                computed.

        If macOS stops a piece on the GPU, the pass begins again, once for a sequence.

        Returns:
            If the tower failed: the sequence that asked first for the picture, which must be ended,
            and the error.

        Raises:
            DeviceLostError: no later step would run.
        """
        began_s = last_s = self._clock()
        while self.wanted:
            key, (picture, waiting) = self._next()
            sequence = waiting[0]
            try:
                self._see_piece(key, picture)
            except BaseException as error:  # the fault boundary of a picture: others go on
                self._passes.pop(key, None)
                self.counts.failed += 1
                return self._failed(sequence, error)
            finally:
                now_s = self._clock()
                self.worked_s = now_s - began_s
                self._shares.charge(sequence.request.tenant, now_s - last_s)
                self.counts.tower_s += now_s - last_s
            if self._slice_s is None or 2 * now_s - last_s - began_s > min(self._slice_s, most_s):
                break  # the next piece would end too late
            last_s = now_s
        return None

    def _failed(
        self, sequence: Sequence, error: BaseException
    ) -> tuple[Sequence, RequestFailedError] | None:
        traceback.clear_frames(error.__traceback__)
        require_gpu(error)
        if gpu_stopped(error) and not sequence.retried:
            sequence.retried = True
            return None
        unseen = RequestFailedError(
            f"A picture of this request cannot be seen: {type(error).__name__}: {error}"
        )
        unseen.__cause__ = error
        return sequence, unseen

    @property
    def tenants(self) -> set[Tenant]:
        return {waiting[0].request.tenant for _, waiting in self.wanted.values()}

    def _next(self) -> tuple[Key, tuple[Picture, list[Sequence]]]:
        tenants = self.tenants
        self._shares.advance(tenants)
        tenant = min(tenants, key=self._shares.used)
        return next(item for item in self.wanted.items() if item[1][1][0].request.tenant == tenant)

    def _see_piece(self, key: Key, picture: Picture) -> None:
        if key not in self._passes:
            self._passes[key] = self._run(picture)
        features = _next_piece(self._passes[key])
        if features is not None:
            self._keep(key, features)

    def _run(self, picture: Picture) -> Generator[mx.array, None, list[Features]]:
        assert self._tower is not None
        tiles = []
        for tile in picture.tiles:
            features = yield from self._tower.run(tile)
            tiles.append(features)
            yield features.vectors
        return tiles

    def _keep(self, key: Key, tiles: Seq[Features]) -> None:
        parts = zip(*[[tile.vectors, *tile.deep] for tile in tiles], strict=True)
        arrays = [mx.concatenate(list(part)).astype(self._dtype) for part in parts]
        mx.eval(arrays)
        picture, waiting = self.wanted[key]
        expected = picture.num_features
        if any(len(array) != expected for array in arrays):
            raise ValueError(f"the tower gave {len(arrays[0])} features; expected {expected}")
        new = KeptFeatures(arrays, set(waiting))
        room = self._max_bytes - new.num_bytes - self.num_bytes
        for other, features in list(self._kept.items()):
            if room < 0 and not features.users:
                room += features.num_bytes
                del self._kept[other]
        self._kept[key] = new
        del self._passes[key], self.wanted[key]
        self.counts.seen += 1

    # -- for steps ------------------------------------------------------------------------------

    def gather(self, batch: Batch) -> FeatureArrays | None:
        """The features of a step; None: it has none. `available` said that all are there."""
        rows, parts = [], []
        for segment in batch.ragged:
            pictures = segment.sequence.pictures
            if pictures is None:
                continue
            for features in pictures.features(segment.start, segment.stop):
                rows.append(features.places - segment.start + segment.row)
                key = _key(features.picture, segment.sequence)
                computed = self._kept[key]
                self._kept.move_to_end(key)
                parts.append([array[features.first : features.stop] for array in computed.arrays])
                if features.stop == features.picture.num_features:
                    computed.users.discard(segment.sequence)
        if not parts:
            return None
        arrays = [mx.concatenate(list(part)) for part in zip(*parts, strict=True)]
        return FeatureArrays(np.concatenate(rows).astype(np.int32), arrays)

    @property
    def num_bytes(self) -> int:
        return sum([features.num_bytes for features in self._kept.values()])

    def stats(self) -> dict[str, Any]:
        return {
            "seen": self.counts.seen,
            "failed": self.counts.failed,
            "tower_seconds": self.counts.tower_s,
            "cached": len(self._kept),
            "in_use": sum([bool(features.users) for features in self._kept.values()]),
            "cached_bytes": self.num_bytes,
            "max_bytes": self._max_bytes,
        }


def _key(picture: Picture, sequence: Sequence) -> Key:
    return sequence.request.cache_salt, picture.digest


def _next_piece(pieces: Generator[mx.array, None, list[Features]]) -> list[Features] | None:
    """Evaluate the next piece of a pass; the features if that was the last."""
    try:
        mx.eval(next(pieces))
        return None
    except StopIteration as end:
        features: list[Features] = end.value
        return features
