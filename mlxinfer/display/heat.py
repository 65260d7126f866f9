"""The probability of each token of an answer, for a notebook."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError

if TYPE_CHECKING:
    from ..outputs import Result


@dataclass(frozen=True, slots=True)
class Heat:
    """Tokens with their log-probability and the most probable ones in their place."""

    tokens: Sequence[tuple[str, float, Sequence[tuple[str, float]]]]

    @classmethod
    def of(cls, result: "Result", token_bytes: Callable[[int], bytes]) -> "Heat":
        """The heat of an answer.

        Raises:
            InvalidRequestError: it has no log-probabilities.
        """
        if result.logprobs is None:
            raise InvalidRequestError(
                "This answer has no log-probabilities: ask for them, with logprobs=3."
            )

        def text(token_id: int) -> str:
            return token_bytes(token_id).decode(errors="replace")

        return cls(
            [
                (text(token), found.logprob, [(text(i), logprob) for i, logprob in found.top])
                for token, found in zip(result.token_ids, result.logprobs, strict=False)
            ]
        )

    def __repr__(self) -> str:
        return "\n".join(f"{exp(logprob):8.2%}  {text!r}" for text, logprob, _ in self.tokens)

    def _repr_html_(self) -> str:
        from .cards import heat_card

        return heat_card(self.tokens)
