"""Requests of pooling models, and which of their rows are computed together. No mlx.

A request has rows of token ids, and gets one vector or score for each. Rows are computed in passes
of a bounded number of tokens, without padding. A pass takes the row that has waited longest, and
fills up with the shortest: nothing waits for ever, and a short text does not wait behind many long
ones. A row of more tokens than a pass has is computed alone. Tenants share the tokens of passes.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ContextLengthError, InvalidRequestError, check_token_ids
from ..fair import NOBODY, Shares, Tenant

FIRST = 1024  # tokens of a pass before any was timed
LEAST, MOST = 256, 16_384  # where passes are sized by time
MOST_ON_CPU = 1024  # fewer read the weights too often, more leave the caches of a CPU
LATEST = 0.3  # weight of the latest measurement


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One text, or a pair of texts, as a model reads it."""

    ids: Sequence[int]
    token_types: Sequence[int] | None = None  # which text of a pair each token is of; None: all 0
    num_prompt: int = 0  # tokens at the beginning that pooling leaves out


@dataclass(slots=True, eq=False)
class PoolingRequest:
    """Rows that are asked for together; they may be computed in several passes.

    Its one event has `pooled`, (rows, dim) float32 in the order of the rows, or an error.
    """

    id: str
    rows: Sequence[TokenRow]
    tenant: Tenant = NOBODY  # whose share of passes it takes
    arrived_s: float = 0.0  # monotonic seconds, set by the engine; so is the next
    started_s: float = 0.0  # when its first pass was launched
    vectors: Any = None  # (rows, dim) float32, those that are computed; set by the loop
    num_missing: int = 0  # rows without a vector yet

    @property
    def num_tokens(self) -> int:
        return sum(len(row.ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class PoolingLimits:
    """Limits that every request must keep: plain values, readable from any thread."""

    vocab_size: int
    max_context: int  # tokens of a row
    num_token_types: int = 0  # that tokens may be of; 0: no row's types are read

    def check(self, request: PoolingRequest) -> None:
        """Raise for a request that can never run.

        Raises:
            InvalidRequestError: it has no rows, an empty one, or tokens or types that are none.
            ContextLengthError: a row is too long.
        """
        if not request.rows:
            raise InvalidRequestError("input is empty; give at least one text.", param="input")
        for index, row in enumerate(request.rows):
            if not row.ids:
                raise InvalidRequestError.of("input", f"{index} has no tokens; give at least one.")
            check_token_ids(row.ids, self.vocab_size, param="input")
            self._check_types(index, row)
            if len(row.ids) > self.max_context:
                raise ContextLengthError(
                    f"input {index} has {len(row.ids)} tokens, and the model reads at most "
                    f"{self.max_context}; shorten it, or ask for it to be truncated.",
                    param="input",
                )

    def _check_types(self, index: int, row: TokenRow) -> None:
        most = max(row.token_types or [0])
        if self.num_token_types and most >= self.num_token_types:
            raise InvalidRequestError(
                f"input {index} has tokens of type {most}, and the model's types are 0 to "
                f"{self.num_token_types - 1}: its tokenizer.json is of another model.",
                param="input",
            )


class WaitingRow:
    """A row that waits, or is computed."""

    __slots__ = ("index", "request", "retried", "row", "taken")

    def __init__(self, request: PoolingRequest, index: int, *, retried: bool = False) -> None:
        self.request = request
        self.index = index  # of the row in its request
        self.row: TokenRow = request.rows[index]
        self.taken = False  # in a pass, or its request has ended
        self.retried = retried  # the GPU stopped a pass of it

    @property
    def num_tokens(self) -> int:
        return len(self.row.ids)


class PassSizer:
    """Tokens of a pass: as many as take `slice_s`, by how long earlier ones took.

    Args:
        slice_s: seconds that a pass may take.
        fixed: tokens of every pass; None: they are sized by time.
        most: tokens of a pass that is sized by time.
    """

    def __init__(self, slice_s: float, fixed: int | None = None, most: int = MOST) -> None:
        self._slice_s = slice_s
        self._fixed = fixed
        self._most = most
        self._token_s: float | None = None  # seconds a token

    @property
    def num_tokens(self) -> int:
        if self._fixed is not None:
            return self._fixed
        if self._token_s is None:
            return min(FIRST, self._most)
        return int(min(max(self._slice_s / self._token_s, LEAST), self._most))

    def halve(self) -> None:
        """Passes are half as large from now on: the GPU stopped one."""
        half = max(self.num_tokens // 2, 1)
        self._most = min(self._most, half)
        self._fixed = None if self._fixed is None else half

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Take in how long tokens took, all layers of each; few of them say little."""
        if num_tokens < LEAST:
            return
        token_s = max(seconds, 1e-6) / num_tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += LATEST * (token_s - self._token_s)


class PassQueue:
    """Rows that wait for a pass: of each tenant in its turn."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._queues: dict[Tenant, RowQueue] = {}

    @property
    def num_waiting(self) -> int:
        return sum([queue.num_waiting for queue in self._queues.values()])

    def add(self, rows: Iterable[WaitingRow]) -> None:
        for row in rows:
            self._queues.setdefault(row.request.tenant, RowQueue()).add(row)

    def discard(self, rows: Sequence[WaitingRow]) -> None:
        for row in rows:
            if not row.taken:
                self._queues[row.request.tenant].take_out(row)
        for tenant in {row.request.tenant for row in rows} & self._queues.keys():
            self._drop_taken(tenant)

    def take(self, most: int) -> list[WaitingRow]:
        """The rows of the next pass, shortest first: about `most` tokens, at least one row.

        The tenant whose turn it is fills the pass; others get what it leaves.
        """
        self._shares.advance(self._queues)
        rows: list[WaitingRow] = []
        for tenant in self._shares.order(self._queues):
            taken = self._queues[tenant].take(most, at_least=0 if rows else 1)
            count = sum([row.num_tokens for row in taken])
            self._shares.charge(tenant, count)
            most -= count
            rows += taken
            self._drop_taken(tenant)
        return sorted(rows, key=lambda row: row.num_tokens)

    def _drop_taken(self, tenant: Tenant) -> None:
        queue = self._queues[tenant]
        queue.drop_taken()
        if not queue.num_waiting:
            del self._queues[tenant]


class RowQueue:
    """The rows of a tenant."""

    def __init__(self) -> None:
        self._by_age: deque[WaitingRow] = deque()
        self._by_length: list[tuple[int, int, WaitingRow]] = []  # a heap
        self._count = 0
        self.num_waiting = 0

    def add(self, row: WaitingRow) -> None:
        self.num_waiting += 1
        self._count += 1
        self._by_age.append(row)
        heapq.heappush(self._by_length, (row.num_tokens, self._count, row))

    def take(self, room: int, *, at_least: int) -> list[WaitingRow]:
        """The oldest row if it fits or has to be taken, then the shortest ones that fit."""
        while self._by_age and self._by_age[0].taken:
            self._by_age.popleft()
        rows: list[WaitingRow] = []
        if self._by_age and (at_least or self._by_age[0].num_tokens <= room):
            rows.append(self.take_out(self._by_age[0]))
            room -= rows[0].num_tokens
        while self._by_length and (self._by_length[0][2].taken or self._by_length[0][0] <= room):
            row = heapq.heappop(self._by_length)[2]
            if not row.taken:
                room -= row.num_tokens
                rows.append(self.take_out(row))
        return rows

    def take_out(self, row: WaitingRow) -> WaitingRow:
        row.taken = True
        self.num_waiting -= 1
        return row

    def drop_taken(self) -> None:
        """Drop entries of rows that do not wait, once most are such: they hold their requests."""
        if len(self._by_age) + len(self._by_length) <= 4 * self.num_waiting:
            return
        self._by_age = deque(row for row in self._by_age if not row.taken)
        self._by_length = [entry for entry in self._by_length if not entry[2].taken]
        heapq.heapify(self._by_length)
