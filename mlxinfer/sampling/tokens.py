"""Token ids that only grow, in one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32 | np.int64]
MIN_ROOM = 64  # tokens


class TokenBuffer:
    """Token ids in the order in which they came.

    Args:
        ids: the first of them.
        last: only the newest so many are kept; None: all are.
        dtype: of the array.
    """

    __slots__ = ("_last", "_room", "_start", "_stop")

    def __init__(
        self,
        ids: Sequence[int] = (),
        *,
        last: int | None = None,
        dtype: type[np.int32] | type[np.int64] = np.int32,
    ) -> None:
        self._last = last
        self._room: Ints = np.empty(0, dtype=dtype)
        self._start = self._stop = 0
        self.extend(ids if last is None else ids[max(len(ids) - last, 0) :])

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def ids(self) -> Ints:
        """(N,) the tokens. Later tokens do not change an array that was read before."""
        return self._room[self._start : self._stop]

    def append(self, token_id: int) -> None:
        """Add one token."""
        self.extend((token_id,))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens. The array moves to a larger one, or is compacted, once in many calls."""
        if self._stop + len(token_ids) > len(self._room):
            kept = self.ids
            room = np.empty(max(2 * (len(kept) + len(token_ids)), MIN_ROOM), dtype=kept.dtype)
            room[: len(kept)] = kept
            self._room, self._start, self._stop = room, 0, len(kept)
        stop = self._stop + len(token_ids)
        self._room[self._stop : stop] = token_ids
        self._stop = stop
        if self._last is not None:
            self._start = max(self._start, stop - self._last)
