"""Logits from hidden states in blocks of the vocabulary, and their KL divergence.

An output projection of 150,000 tokens is the largest matrix of many models, and the logits of a
thousand positions are as large again: neither is held whole. The source's logits are written to the
disk, and so are the output's, which runs layer by layer as the source does.

Limits. A broken conversion (rows in a wrong order, a scale lost) diverges by several nats; the
limits are far above what most good 2-, 4- and 8-bit models have and far below that. Some models
lose more in the same format. Where a limit is exceeded, what the format can reach is therefore
measured: the text runs through layers whose weights are rounded to the nearest code, and where that
diverges further than the limit it is the limit. Passing means "not broken"; the divergence itself
says how good it is.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
    arranged: ArrangedSource, streamed: StreamedModel, hidden: mx.array
) -> Iterator[tuple[slice, Floats]]:
    """Yield a slice of columns, and the logits (T, columns) of hidden (T, hidden) in it."""
    start, size = 0, MAX_LOGITS // len(hidden) * hidden.shape[1]
    for rows in arranged.blocks(streamed.head, min(BLOCK, size)):
        logits = _logits_of(arranged, hidden, rows.astype(mx.float32))
        yield slice(start, start + rows.shape[0]), logits
        start += rows.shape[0]


def _logits_of(arranged: ArrangedSource, hidden: mx.array, matrix: mx.array) -> Floats:
    """(T, hidden) and rows (columns, hidden) of the output projection -> (T, columns)."""
    logits = scaled_logits(hidden @ matrix.T, arranged.family_config)
    return np.asarray(as_numpy(logits), dtype=np.float32)


def write(
    hidden: Mapping[Path, mx.array],
    arranged: ArrangedSource,
    streamed: StreamedModel,
    change: Change,
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Logits into files, (T, vocab_size) float32 and nothing else. The matrix is read once.

    Args:
        hidden: (T, hidden) of each file.
        tell: is called with the number of columns that are written.
    """
    vocab, longest, start = arranged.config.vocab_size, max(map(len, hidden.values())), 0
    size = MAX_LOGITS // longest * streamed.head.shape[-1]
    with ExitStack() as stack:
        files = {path: stack.enter_context(partial_path(path).open("wb")) for path in hidden}
        for rows in arranged.blocks(streamed.head, min(BLOCK, size)):
            matrix = change(rows.astype(mx.float32))
            for path, file in files.items():
                for row, part in enumerate(_logits_of(arranged, hidden[path], matrix)):
                    file.seek((row * vocab + start) * 4)
                    file.write(part.data)
            start += rows.shape[0]
            tell(start)
    for path in files:
        os.replace(partial_path(path), path)


def log_normaliser(parts: Iterator[tuple[slice, Floats]], count: int) -> Doubles:
    """log of the sum of exponentials of each of `count` positions."""
    total = np.full(count, -np.inf)
    for _, logits in parts:
        top = logits.max(axis=-1, keepdims=True)
        sums = np.log(np.exp(logits - top).sum(axis=-1, dtype=np.float64))
        total = np.logaddexp(total, top[:, 0] + sums)
    return total


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
    means = []
    for other in others:
        theirs = log_softmax(_logits_of(arranged, norm(other), matrix))
        kl = np.einsum("pv,pv->p", shares, kept - theirs)
        means.append(float(np.maximum(kl, 0).mean()))
    return means


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


LIMITS = (  # least bits a weight: (highest mean divergence, lowest share of same tokens)
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
        return self.kl_mean <= self.max_kl and self.clear_top1 >= self.min_top1


def limits_for(bits_per_weight: float) -> tuple[float, float]:
    """Most mean divergence, in nats; least share of clear positions with the same best token."""
    return next(limits for bits, limits in LIMITS if bits_per_weight >= bits)


def reachable_limits(
    sequences: Sequence[list[int]], reference: Path, nearest: Path, limits: tuple[float, float]
) -> tuple[float, float]:
    """The limits, or what rounding to the nearest reaches on these texts where that is worse.

    Args:
        nearest: the file of the logits with weights rounded to the nearest.
        limits: largest errors that are accepted, as `limits_for` returns them.
    """
    check = compare_logits(sequences, reference, nearest, np.inf)
    return (
        max(limits[0], _short(MARGIN * check.kl_mean)),
        min(limits[1], _short(check.clear_top1 - SLACK)),
    )


def compare_logits(
    sequences: Sequence[list[int]],
    reference: Path,
    output: Path,
    max_kl: float,
    min_top1: float = 0.0,
) -> LogitCheck:
    """Compare two files of logits of sequences of one length, the source's and others."""
    parts = zip(*_compared(sequences, reference, output), strict=True)
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
    sequences: Sequence[list[int]], reference: Path, output: Path
) -> Iterator[tuple[Doubles, Doubles, Doubles, Doubles]]:
    """Divergence, same best token, clear best token (T,) each, and losses of source and output.

    Losses are (2, T), less one position where a sequence ends: nothing follows the last token.
    """
    count = sum(map(len, sequences))
    plain, other = (_rows_of(path, count) for path in (reference, output))
    if plain.shape != other.shape:
        raise damaged(reference)
    step, first = max(1, MAX_LOGITS // plain.shape[1]), 0
    for ids in sequences:
        for start in range(0, len(ids), step):
            rows = slice(first + start, first + min(start + step, len(ids)))
            following = np.array(ids[start + 1 : start + 1 + step])
            yield _differences(np.array(plain[rows]), np.array(other[rows]), following)
        first += len(ids)


def _rows_of(path: Path, count: int) -> NDArray[np.float32]:
    """A file of logits as (count, vocab_size), mapped."""
    size = path.stat().st_size if path.exists() else 0
    if not size or size % (4 * count):
        raise damaged(path)
    return np.memmap(path, np.float32, "r").reshape(count, -1)


def _differences(
    plain: Floats, other: Floats, following: NDArray[np.int64]
) -> tuple[Doubles, Doubles, Doubles, Doubles]:
    """Compare logits (T, vocab_size), see `_compared`.

    `following`: the tokens behind the first of these positions.
    """
    same = (plain.argmax(-1) == other.argmax(-1)).astype(float)
    ours, theirs = log_softmax(plain), log_softmax(other)
    is_clear = (ours > ours.max(-1, keepdims=True) - CLEAR).sum(-1) == 1
    at = np.arange(len(following)), following
    losses = np.stack([-ours[at], -theirs[at]]).astype(float)
    kl = np.einsum("pv,pv->p", np.exp(ours), ours - theirs).astype(float)
    return kl, same, is_clear.astype(float), losses


def log_softmax(logits: Floats) -> Floats:
    """(T, vocab) -> (T, vocab); the sum is taken in float64."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype("f4")
    return shifted


def _short(value: float) -> float:
    return float(f"{max(value, 0.0):.5g}") if np.isfinite(value) else float("nan")
