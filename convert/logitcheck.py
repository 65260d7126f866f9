"""Logits of the output against the source's: KL divergence and agreement. Knows no engine.

The source's were computed layer by layer (measure.py) and lie on the disk; the output's come from a
callable, so that whoever assembles decides what runs the model.

Limits. A conversion that went wrong (rows in a wrong order, a scale lost) leaves divergences of
several nats; the limits are far above what good 2-bit, 4-bit and 8-bit models have and far below
that. They say "not broken"; how good it is says the figure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import damaged

LogitsOf = Callable[[list[int]], NDArray[np.float32]]  # ids (T,) -> logits (T, vocab_size)
MAX_KL = ((15.0, 0.005), (7.5, 0.02), (5.5, 0.1), (4.9, 0.2), (3.9, 0.4), (2.9, 1.5), (0.0, 4.0))
ROWS = 64  # positions that are compared at once


@dataclass(frozen=True, slots=True)
class LogitCheck:
    """One context length."""

    context: int  # tokens
    positions: int  # that were compared
    kl_mean: float  # KL(source || output), nats
    kl_p99: float
    top1: float  # share of positions where the most probable token is the same
    perplexity: float  # of the output, on the text
    source_perplexity: float
    max_kl: float  # limit of kl_mean

    @property
    def passed(self) -> bool:
        """Within the limit; NaN is not."""
        return self.kl_mean <= self.max_kl


def limit_for(bits_per_weight: float) -> float:
    """The limit of the mean divergence, in nats."""
    return next(limit for bits, limit in MAX_KL if bits_per_weight >= bits)


def compare_logits(
    sequences: Sequence[list[int]], reference: Path, logits_of: LogitsOf, max_kl: float
) -> LogitCheck:
    """Run sequences of one length and compare with the .npy file of the source's logits.

    Raises:
        ConversionError: the file is damaged.
    """
    kept = _logits(reference, sum(len(ids) for ids in sequences))
    kl: list[NDArray[np.float64]] = []
    same: list[NDArray[np.bool_]] = []
    losses: list[NDArray[np.float64]] = []
    for number, ids in enumerate(sequences):
        found = logits_of(ids)
        for start in range(0, len(ids), ROWS):
            rows = slice(start, min(start + ROWS, len(ids)))
            first = number * len(ids)
            plain = log_softmax(kept[first + rows.start : first + rows.stop])
            other = log_softmax(found[rows])
            kl.append((np.exp(plain) * (plain - other)).sum(axis=-1))
            same.append(plain.argmax(-1) == other.argmax(-1))
            following = np.array(ids[rows.start + 1 : rows.stop + 1])
            at = np.arange(len(following)), following
            losses.append(np.stack([-plain[at], -other[at]]))
    divergence = np.concatenate(kl)
    source_loss, loss = np.concatenate(losses, axis=-1).mean(axis=-1)
    return LogitCheck(
        context=len(sequences[0]),
        positions=len(divergence),
        kl_mean=_short(divergence.mean()),
        kl_p99=_short(np.quantile(divergence, 0.99)),
        top1=_short(np.concatenate(same).mean()),
        perplexity=_short(np.exp(loss)),
        source_perplexity=_short(np.exp(source_loss)),
        max_kl=max_kl,
    )


def _logits(path: Path, count: int) -> NDArray[np.float32]:
    """`count` rows of them, read when they are looked at."""
    try:
        kept: NDArray[np.float32] = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, FileNotFoundError) as error:
        raise damaged(path) from error
    if kept.ndim != 2 or len(kept) != count or kept.dtype != np.float32:
        raise damaged(path)
    return kept


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """(T, vocab) -> (T, vocab)."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _short(value: float) -> float:
    return float(f"{max(value, 0.0):.5g}") if np.isfinite(value) else float("nan")
