"""Logits from hidden states in blocks of the vocabulary, and their KL divergence.

An output projection of 150,000 tokens is the largest matrix of many models, and the logits of a
thousand positions are as large again: neither is held whole. The source's logits are written to the
disk; the output's come from a callable, since the caller decides what runs the model.

Limits. A broken conversion (rows in a wrong order, a scale lost) diverges by several nats; the
limits are far above what most good 2-, 4- and 8-bit models have and far below that. Some models
lose more in the same format. What a format can reach is therefore measured: the text runs through
layers whose weights are rounded to the nearest code, and where that diverges further than the limit
it is the limit. Passing means "not broken"; the divergence itself says how good it is.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...models.decoder import scaled_logits
from ..arrange import ArrangedSource
from ..arrays import Floats, as_numpy
from ..files import damaged, partial_path
from ..quantise import QuantisationMethod, round_trip
from .stream import Change, StreamedModel

BLOCK = 1 << 22  # numbers of the matrix that are held at once
MAX_LOGITS = 1 << 21  # that are held at once
MAX_PROBED = 8192  # tokens over which divergences of probes are taken

Doubles = NDArray[np.float64]


def blocks(
    arranged: ArrangedSource,
    streamed: StreamedModel,
    hidden: mx.array,
    change: Change = lambda rows: rows,
) -> Iterator[tuple[slice, Floats]]:
    """Which columns, and the logits (T, columns) of hidden (T, hidden) there.

    `change`: of the rows of the output projection.
    """
    start, size = 0, MAX_LOGITS // len(hidden) * hidden.shape[1]
    for rows in arranged.blocks(streamed.head, min(BLOCK, size)):
        found = _logits_of(arranged, hidden, change(rows.astype(mx.float32)))
        yield slice(start, start + rows.shape[0]), found
        start += rows.shape[0]


def _logits_of(arranged: ArrangedSource, hidden: mx.array, matrix: mx.array) -> Floats:
    """(T, hidden) and rows (columns, hidden) of the output projection -> (T, columns)."""
    found = scaled_logits(hidden @ matrix.T, arranged.family_config)
    return np.asarray(as_numpy(found), dtype=np.float32)


def write(
    path: Path,
    arranged: ArrangedSource,
    streamed: StreamedModel,
    hidden: mx.array,
    change: Change = lambda rows: rows,
) -> None:
    """All logits of hidden (T, hidden) into a file: (T, vocab_size) float32 and nothing else.

    Raises:
        OSError: the disk is full; then there is no file of this name.
    """
    partial, vocab = partial_path(path), arranged.config.vocab_size
    with partial.open("wb") as file:
        for columns, logits in blocks(arranged, streamed, hidden, change):
            for row, part in enumerate(logits):
                file.seek((row * vocab + columns.start) * 4)
                file.write(part.data)
    os.replace(partial, path)


def log_normaliser(parts: Iterator[tuple[slice, Floats]], count: int) -> Doubles:
    """log of the sum of exponentials of each of `count` positions."""
    total = np.full(count, -np.inf)
    for _, logits in parts:
        total = np.logaddexp(total, _log_sum(logits))
    return total


def _log_sum(logits: Floats) -> Doubles:
    top = logits.max(axis=-1, keepdims=True)
    found: Doubles = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1, dtype=np.float64))
    return found


def divergences(
    arranged: ArrangedSource,
    streamed: StreamedModel,
    reference: mx.array,
    others: Sequence[mx.array],
    method: QuantisationMethod | None = None,
) -> list[float]:
    """KL(reference || other), mean over positions, in nats, for each of several others.

    Over the `MAX_PROBED` tokens that the reference finds most probable, which have nearly all of
    the probability. The logits of one of the others are held at a time.

    Args:
        reference: (P, hidden) states before the final norm.
        others: (P, hidden) of the same positions.
        method: how the output projection of the others is quantised; None: not.
    """
    norm = streamed.final_norm()
    plain = norm(reference)
    probable = _most_probable(arranged, streamed, plain)
    matrix = streamed.rows(streamed.head, probable).astype(mx.float32)
    kept = log_softmax(_logits_of(arranged, plain, matrix))
    shares = np.exp(kept)
    if method is not None:
        matrix = round_trip(matrix, method)
    found = []
    for other in others:
        theirs = log_softmax(_logits_of(arranged, norm(other), matrix))
        kl = np.einsum("pv,pv->p", shares, kept - theirs)
        found.append(float(np.maximum(kl, 0).mean()))
    return found


def _most_probable(
    arranged: ArrangedSource, streamed: StreamedModel, hidden: mx.array
) -> list[int]:
    """The tokens of most probability over all positions of hidden (T, hidden), in rising order."""
    vocab = arranged.config.vocab_size
    if vocab <= MAX_PROBED:
        return list(range(vocab))
    normaliser = log_normaliser(blocks(arranged, streamed, hidden), len(hidden))[:, None]
    total = np.zeros(vocab)
    for columns, logits in blocks(arranged, streamed, hidden):
        total[columns] = np.exp(logits - normaliser).sum(axis=0)
    return sorted(np.argpartition(total, -MAX_PROBED)[-MAX_PROBED:].tolist())


LogitsOf = Callable[[list[int]], NDArray[np.float32]]  # ids (T,) -> logits (T, vocab_size)
LIMITS = (  # from so many bits a weight on: mean divergence at most, share of same tokens at least
    *((15.0, (0.005, 0.99)), (7.5, (0.02, 0.97)), (5.5, (0.1, 0.9)), (4.9, (0.2, 0.85))),
    *((3.9, (0.4, 0.8)), (2.9, (1.5, 0.5)), (0.0, (4.0, 0.2))),
)
MARGIN, SLACK = 1.1, 0.05  # beyond what rounding to the nearest reaches
CLEAR = np.log(2.0)  # by which the most probable token leads where it is clear


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
    clear_top1: float = 1.0  # as top1, where the source's token is twice as likely as the next
    min_top1: float = 0.0  # limit of clear_top1

    @property
    def passed(self) -> bool:
        """Within the limits; NaN is not."""
        return self.kl_mean <= self.max_kl and self.clear_top1 >= self.min_top1


def limits_for(bits_per_weight: float) -> tuple[float, float]:
    """Most mean divergence, in nats; least share of clear positions with the same best token."""
    return next(limits for bits, limits in LIMITS if bits_per_weight >= bits)


def reachable_limits(
    sequences: Sequence[list[int]],
    reference: Path,
    nearest: Path,
    limits: tuple[float, float],
) -> tuple[float, float]:
    """The limits, or what rounding to the nearest reaches on these texts where that is worse.

    Args:
        sequences: of one length.
        reference: the file of the source's logits.
        nearest: the file of the logits with weights rounded to the nearest.
        limits: largest errors that are accepted, as `limits_for` returns them.
    """
    length = len(sequences[0])
    size = nearest.stat().st_size // (4 * length * len(sequences))
    rows = iter(np.memmap(nearest, np.float32, "r").reshape(-1, length, size))
    found = compare_logits(sequences, reference, lambda _: next(rows), np.inf)
    return (
        max(limits[0], _short(MARGIN * found.kl_mean)),
        min(limits[1], _short(found.clear_top1 - SLACK)),
    )


def compare_logits(
    sequences: Sequence[list[int]],
    reference: Path,
    logits_of: LogitsOf,
    max_kl: float,
    min_top1: float = 0.0,
) -> LogitCheck:
    """Run sequences of one length and compare with the file of the source's logits.

    Raises:
        ConversionError: the file is damaged.
    """
    parts = zip(*_compared(sequences, reference, logits_of), strict=True)
    divergence, same, clear, losses = (np.concatenate(part, axis=-1) for part in parts)
    source_loss, loss = losses.mean(axis=-1)
    return LogitCheck(
        context=len(sequences[0]),
        positions=len(divergence),
        kl_mean=_short(divergence.mean()),
        kl_p99=_short(np.quantile(divergence, 0.99)),
        top1=_short(same.mean()),
        perplexity=_short(np.exp(loss)),
        source_perplexity=_short(np.exp(source_loss)),
        max_kl=max_kl,
        clear_top1=_short(same[clear == 1].mean()) if clear.any() else 1.0,
        min_top1=min_top1,
    )


def _compared(
    sequences: Sequence[list[int]], reference: Path, logits_of: LogitsOf
) -> Iterator[tuple[Doubles, Doubles, Doubles, Doubles]]:
    """Divergence, same best token, clear best token (T,) each, and losses of source and output.

    Losses are (2, T), less one position where a sequence ends: nothing follows the last token.
    """
    first = 0
    for ids in sequences:
        found = logits_of(ids)
        vocab = found.shape[1]
        if not reference.exists() or reference.stat().st_size != 4 * vocab * len(ids) * len(
            sequences
        ):
            raise damaged(reference)
        step = max(1, MAX_LOGITS // vocab)
        for start in range(0, len(ids), step):
            rows = slice(start, min(start + step, len(ids)))
            size, at = len(found[rows]) * vocab, (first + start) * vocab * 4
            kept = np.fromfile(reference, np.float32, size, offset=at)
            plain = log_softmax(kept.reshape(-1, vocab))
            other = log_softmax(found[rows])
            second, best = np.partition(plain, -2, axis=-1)[:, -2:].T
            following = np.array(ids[rows.start + 1 : rows.stop + 1])
            at = np.arange(len(following)), following
            losses = np.stack([-plain[at], -other[at]])
            kl = (np.exp(plain) * (plain - other)).sum(axis=-1)
            same = (plain.argmax(-1) == other.argmax(-1)).astype(float)
            yield kl, same, (best - second >= CLEAR).astype(float), losses
        first += len(ids)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """(T, vocab) -> (T, vocab)."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _short(value: float) -> float:
    return float(f"{max(value, 0.0):.5g}") if np.isfinite(value) else float("nan")
