"""Scores of a prompt's own tokens, for requests that ask for log-probabilities of the prompt."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..core import TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PromptScores:
    """Log-probabilities of a prompt's own tokens, from the logits of its positions in order.

    The first token has no score.

    Args:
        num_top: how many of the most probable tokens to name at each position.

    Attributes:
        scores: of each token; None: of the first.
    """

    def __init__(self, prompt_ids: Sequence[int], num_top: int) -> None:
        self._ids = prompt_ids
        self._num_top = num_top
        self._num_rows = 0
        self.scores: list[TokenLogprobs | None] = [None]

    def watched(self, listener: Callable[[TokenEvent], None]) -> Callable[[TokenEvent], None]:
        def watch(event: TokenEvent) -> None:
            if event.prompt_logits is not None:
                self.push(event.prompt_logits)
            else:
                listener(event)

        return watch

    def push(self, logits: "NDArray[np.float32]") -> None:
        """Score the tokens that follow the next n positions.

        Args:
            logits: (n, vocab).
        """
        import numpy as np

        targets = self._ids[self._num_rows + 1 : self._num_rows + 1 + len(logits)]
        self._num_rows += len(logits)
        for row, target in zip(logits, targets, strict=False):
            scores = row - row.max()  # (vocab,)
            scores -= np.log(np.exp(scores).sum())
            top = tuple((int(i), float(scores[i])) for i in _largest(scores, self._num_top))
            self.scores.append(TokenLogprobs(float(scores[target]), top))


def _largest(scores: "NDArray[np.float32]", count: int) -> "list[int]":
    """Indices of the largest, most probable first; of equal ones the lower index."""
    import numpy as np

    if count < 2:
        return [int(scores.argmax())] * count
    near = np.argpartition(-scores, min(count, len(scores) - 1))[:count]
    order: list[int] = near[np.lexsort((near, -scores[near]))].tolist()
    return order
