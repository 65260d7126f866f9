"""How much of a model's answers other weights or a quantised cache change. Knows LLM and numpy."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import Figures
from mlxinfer.llm import LLM
from mlxinfer.memory import give_back_memory

DTYPE: Final = "float32"  # of activations and of what is not quantised
ROWS = 64  # positions that are compared at once
CHUNK = 128  # tokens of a step: the logits of all in one step would be held three times

Logits = NDArray[np.float32]


@contextmanager
def opened(model: str | Path, **options: Any) -> Iterator[LLM]:
    """Yield a model in float32. Behind it all that it took is free, the tokenizer's parts too."""
    given = {"dtype": DTYPE, "prefill_chunk": CHUNK, "progress": False, **options}
    with LLM(str(model), **given) as llm:
        give_back_memory()  # what reading the tokenizer took
        yield llm
    del llm
    gc.collect()
    give_back_memory()


class HeldOut:
    """The first windows of a text in tokens, with the logits that a model gives for them.

    Args:
        model: a folder or name.
        length: tokens, at most.
        text: a file.
    """

    def __init__(self, model: str | Path, length: int, text: Path) -> None:
        with opened(model) as llm:
            ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"), parse_special=True)
            self.ids = list(ids[:length])
            self._reference = StoredLogits([llm.logits(self.ids)])

    def quality(self, model: str | Path) -> Figures:
        """Compare the answers of another model."""
        with opened(model) as llm:
            logits = StoredLogits([llm.logits(self.ids)])
        return self.compare(logits)

    def compare(self, logits: "StoredLogits") -> Figures:
        """Compare other logits of the same tokens."""
        return compared([self.ids], [self._reference], [logits])


class StoredLogits:
    """Logits (T, vocab) in a file without a name: a large vocabulary's take a gigabyte."""

    def __init__(self, parts: Iterable[Logits]) -> None:
        self._file = TemporaryFile()  # noqa: SIM115
        self._width = 0
        for part in parts:
            self._width = part.shape[1]
            part.tofile(self._file)

    def __getitem__(self, rows: slice) -> Logits:
        self._file.seek(rows.start * self._width * 4)
        count = (rows.stop - rows.start) * self._width
        return np.fromfile(self._file, np.float32, count).reshape(-1, self._width)


def compared(
    windows: Sequence[Sequence[int]],
    reference: Iterable[StoredLogits],
    others: Iterable[StoredLogits],
) -> Figures:
    """Compare two sets of logits, (T, vocab) for each window.

    `kl_mean` and `kl_p99` are of KL(reference || other) in nats, over all positions; `top1` is the
    share of positions where the most probable token is the same.
    """
    kl, same, losses = [], [], []
    for ids, plain, other in zip(windows, reference, others, strict=True):
        for start in range(0, len(ids), ROWS):
            rows = slice(start, start + ROWS)
            expected, actual = log_softmax(plain[rows]), log_softmax(other[rows])
            kl.append(divergence(expected, actual))
            same.append(expected.argmax(-1) == actual.argmax(-1))
            next_ids = np.array(ids[start + 1 : start + ROWS + 1], dtype=np.int64)
            losses.append(-actual[np.arange(len(next_ids)), next_ids])
    divergences = np.concatenate(kl)
    return {
        "kl_mean": float(divergences.mean()),
        "kl_p99": float(np.quantile(divergences, 0.99)),
        "top1": float(np.concatenate(same).mean()),
        "perplexity": float(np.exp(np.concatenate(losses).mean(dtype=np.float64))),
    }


def log_softmax(logits: Logits) -> Logits:
    """(T, vocab) -> (T, vocab). A vocabulary may be large: sums are float64, numbers are not."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    sums = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    normalised: Logits = shifted - np.log(sums).astype(logits.dtype)
    return normalised


def divergence(plain: Logits, other: Logits) -> NDArray[np.float64]:
    """KL(plain || other) of each position, (T, vocab) -> (T,), nats."""
    actual: NDArray[np.float64] = (np.exp(plain) * (plain - other)).sum(axis=-1, dtype=np.float64)
    return actual


COLUMNS = ["KL mean", "KL p99", "same top-1", "perplexity"]


def cells(quality: Figures, digits: int) -> list[str]:
    """Of a table with COLUMNS; `digits` of the mean."""
    return [
        f"{quality['kl_mean']:.{digits}f}",
        f"{quality['kl_p99']:.{digits}f}",
        f"{quality['top1']:.2%}",
        f"{quality['perplexity']:.4f}",
    ]
