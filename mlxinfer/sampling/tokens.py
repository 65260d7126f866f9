"""Token ids of a request that only grow, and how much of them the newest ones repeat."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32 | np.int64]
MIN_ROOM = 64  # tokens


class TokenBuffer:
    """Token ids in the order in which they came.

    Args:
        last: number of the newest tokens that are kept; None: all are.
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
        if self._stop == len(self._room):
            self._make_room(1)
        self._room[self._stop] = token_id
        self._stop += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        stop = self._stop + len(token_ids)
        if stop > len(self._room):
            self._make_room(len(token_ids))
            stop = self._stop + len(token_ids)
        self._room[self._stop : stop] = token_ids
        self._stop = stop

    def _make_room(self, count: int) -> None:
        """Move the tokens that are kept to an array with room for more, once in many calls."""
        ids = self.ids
        self._room = np.empty(max(2 * (len(ids) + count), MIN_ROOM), dtype=ids.dtype)
        self._room[: len(ids)] = ids
        self._stop = len(ids)


class Repeats:
    """The tokens of one request, and the length of the repetition that they end with."""

    def __init__(self, ids: Sequence[int], breakers: frozenset[int]) -> None:
        self.breakers = breakers
        self._size = len(ids)
        self._ids = np.full(max(2 * len(ids), 64), -1, dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._lengths = np.zeros(len(self._ids), dtype=np.int32)
        self._lengths[: len(ids)] = common_suffixes(ids, breakers)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> Ints:
        """(N,) the tokens."""
        return self._ids[: self._size]

    @property
    def lengths(self) -> Ints:
        """(N,) how many tokens that end at each place equal the newest ones, back to a breaker.

        The last place has 0.
        """
        return self._lengths[: self._size]

    def append(self, token_id: int) -> None:
        size = self._size
        if size == len(self._ids):
            self._ids = np.pad(self._ids, (0, size), constant_values=-1)
            self._lengths = np.pad(self._lengths, (0, size))
        before = np.append(np.int32(0), self._lengths[: size - 1]) if size else self._lengths[:0]
        again = (self._ids[:size] == token_id) & (token_id not in self.breakers)
        self._lengths[:size] = np.where(again, before + 1, 0)
        self._ids[size], self._lengths[size] = token_id, 0
        self._size += 1


def common_suffixes(ids: Sequence[int], breakers: frozenset[int]) -> Ints:
    """(N,) how many tokens that end at each place equal the last ones; 0 at the last place.

    None of them reaches over a breaker. Linear time: Gusfield's Z algorithm (1997) on the reversed
    tokens.
    """
    last = list(reversed(ids))
    free = next((i for i, token_id in enumerate(last) if token_id in breakers), len(last))
    lengths = np.zeros(len(last), dtype=np.int32)
    left = right = 0
    for i in range(1, len(last)):
        length = min(right - i, int(lengths[i - left])) if i < right else 0
        while i + length < len(last) and last[length] == last[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.minimum(lengths[::-1], free)
