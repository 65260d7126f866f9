"""Requests of pooling models: rows of token ids in, one vector or score each out. No mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import check_token_ids
from ..errors import ContextLengthError, InvalidRequestError


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
    arrived_s: float = 0.0  # monotonic seconds, set by the engine; so is the next
    started_s: float = 0.0  # when its first pass was launched
    vectors: Any = None  # (rows, dim) float32, as far as they are computed; set by the loop
    num_missing: int = 0  # rows without a vector yet

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(len(row.ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class PoolingLimits:
    """What requests must fit into, as plain values that any thread may read."""

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
                raise InvalidRequestError(
                    f"input {index} has no tokens; give at least one.", param="input"
                )
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
