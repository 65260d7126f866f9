"""How much of a model's answers other weights or a quantised KV cache change. Knows LLM and numpy.

The model is the bfloat16 checkpoint of the tests, an earlier and smaller demo. The text is
`held_out.txt`: conversations like those of its training, with questions that it never saw.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxinfer.llm import LLM
from tests.bench.tables import Figures

HELD_OUT = Path(__file__).with_name("held_out.txt")
MODEL = Path(__file__).parents[1] / "data" / "demo-bf16"  # knows the language of the text
DTYPE, DTYPE_BYTES = "float32", 4  # of activations and of what is not quantised

Floats = NDArray[np.float64]


class HeldOut:
    """Windows of the text as a model's tokens, and what that model says of them.

    Args:
        model: a folder or name.
        length: tokens of a window.
        limit: most windows; None: as many whole ones as the text has.
    """

    def __init__(self, model: str | Path, length: int, limit: int | None) -> None:
        with LLM(str(model), dtype=DTYPE, progress=False) as llm:
            ids = llm.tokenizer.encode(HELD_OUT.read_text(encoding="utf-8"), parse_special=True)
            starts = range(0, len(ids) - length + 1, length)[:limit]
            self.windows = [list(ids[start : start + length]) for start in starts]
            self._reference = [log_softmax(llm.logits(window)) for window in self.windows]

    @property
    def num_tokens(self) -> int:
        """Tokens of all windows."""
        return sum(map(len, self.windows))

    def quality(self, model: str | Path, **options: Any) -> Figures:
        """Compare the answers of another model, or of the same one with other options of LLM."""
        with LLM(str(model), dtype=DTYPE, progress=False, **options) as llm:
            found = [log_softmax(llm.logits(window)) for window in self.windows]
        return compared(self.windows, self._reference, found)


def compared(
    windows: Sequence[Sequence[int]], reference: Sequence[Floats], found: Sequence[Floats]
) -> Figures:
    """Compare two sets of log-probabilities, (T, vocab) for each window.

    `kl_mean` and `kl_p99` are of KL(reference || found) in nats, over all positions; `top1` is the
    share of positions where the most probable token is the same.
    """
    over = partial(zip, strict=True)
    kl = np.concatenate([divergence(plain, other) for plain, other in over(reference, found)])
    same = np.concatenate([p.argmax(-1) == o.argmax(-1) for p, o in over(reference, found)])
    losses = [-o[np.arange(len(ids) - 1), np.array(ids[1:])] for ids, o in over(windows, found)]
    return {
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "top1": float(same.mean()),
        "perplexity": float(np.exp(np.concatenate(losses).mean())),
    }


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """(T, vocab) -> (T, vocab) float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def divergence(plain: Floats, other: Floats) -> Floats:
    """KL(plain || other) of each position, (T, vocab) -> (T,), nats."""
    found: Floats = (np.exp(plain) * (plain - other)).sum(axis=-1)
    return found


COLUMNS = ["KL mean", "KL p99", "same top-1", "perplexity"]


def cells(quality: Figures, digits: int) -> list[str]:
    """Of a table with COLUMNS; `digits` of the mean."""
    return [
        f"{quality['kl_mean']:.{digits}f}",
        f"{quality['kl_p99']:.{digits}f}",
        f"{quality['top1']:.2%}",
        f"{quality['perplexity']:.4f}",
    ]
