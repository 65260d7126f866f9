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

    __slots__ = ("_last", "_room", "_stop")

    def __init__(
        self,
        ids: Sequence[int] = (),
        *,
        last: int | None = None,
        dtype: type[np.int32] | type[np.int64] = np.int32,
    ) -> None:
        self._last = last
        self._room: Ints = np.empty(0, dtype=dtype)
        self._stop = 0
        self.extend(ids if last is None else ids[max(len(ids) - last, 0) :])

    def __len__(self) -> int:
        return self._stop if self._last is None else min(self._stop, self._last)

    @property
    def ids(self) -> Ints:
        """(N,) the tokens. Later tokens do not change an array that was read before."""
        start = 0 if self._last is None else max(self._stop - self._last, 0)
        return self._room[start : self._stop]

    def append(self, token_id: int) -> None:
        """Add one token."""
        if self._stop == len(self._room):
            self._make_room(1)
        self._room[self._stop] = token_id
        self._stop += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens."""
        stop = self._stop + len(token_ids)
        if stop > len(self._room):
            self._make_room(len(token_ids))
            stop = self._stop + len(token_ids)
        self._room[self._stop : stop] = token_ids
        self._stop = stop

    def _make_room(self, count: int) -> None:
        """Move the tokens that are kept to an array with room for more, once in many calls."""
        kept = self.ids
        self._room = np.empty(max(2 * (len(kept) + count), MIN_ROOM), dtype=kept.dtype)
        self._room[: len(kept)] = kept
        self._stop = len(kept)
