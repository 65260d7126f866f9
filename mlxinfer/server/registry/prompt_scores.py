"""Log-probabilities of a prompt's own tokens, from its logits. Knows numpy, no requests."""

from collections.abc import Sequence
from typing import Any

from ...core import TokenLogprobs


class PromptScores:
    """Takes the logits of a prompt's positions in order; the first token has no score.

    Args:
        prompt_ids: the whole prompt.
        num_top: how many of the most probable tokens to name at each position.
    """

    def __init__(self, prompt_ids: Sequence[int], num_top: int) -> None:
        self._ids = prompt_ids
        self._num_top = num_top
        self._num_rows = 0
        self.scores: list[TokenLogprobs | None] = [None]

    def push(self, logits: Any) -> None:
        """Score the tokens that follow these positions.

        Args:
            logits: numpy (n, vocab) float32 of the next n positions.
        """
        import numpy as np

        targets = self._ids[self._num_rows + 1 : self._num_rows + 1 + len(logits)]
        self._num_rows += len(logits)
        for row, target in zip(np.asarray(logits), targets, strict=False):
            scores = row - row.max()  # (vocab,)
            scores -= np.log(np.exp(scores).sum())
            top = tuple((int(i), float(scores[i])) for i in _largest(scores, self._num_top))
            self.scores.append(TokenLogprobs(float(scores[target]), top))


def _largest(scores: Any, count: int) -> Any:
    """Indices of the largest, most probable first; of equal ones the lower index."""
    import numpy as np

    if count < 2:
        return [scores.argmax()] * count
    near = np.argpartition(-scores, min(count, len(scores) - 1))[:count]
    return near[np.lexsort((near, -scores[near]))]
