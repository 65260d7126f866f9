"""Logits from hidden states, a block of the vocabulary at a time. Knows no layers.

An output projection of 150,000 tokens is the largest matrix of many models, and the logits of a
thousand positions are as large again: neither is ever held whole, but what is compared on the disk.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .arrange import Arranged
from .arrays import as_numpy
from .files import allocate
from .numbers import Floats
from .quantise import Method
from .roundtrip import after
from .stream import Streamed

BLOCK = 1 << 22  # numbers of the matrix that are held at once

Doubles = NDArray[np.float64]


def blocks(
    arranged: Arranged, streamed: Streamed, hidden: mx.array, method: Method | None = None
) -> Iterator[tuple[slice, Floats]]:
    """Which columns, and the logits (T, columns) of hidden (T, hidden) there.

    `method`: as if the matrix were quantised so.
    """
    cap, start = arranged.config.final_softcap, 0
    for rows in arranged.blocks(streamed.head, BLOCK):
        matrix = rows.astype(mx.float32)
        if method is not None:
            matrix = after(matrix, method)
        logits = hidden @ matrix.T
        if cap is not None:
            logits = mx.tanh(logits / cap) * cap
        found = np.asarray(as_numpy(logits), dtype=np.float32)
        yield slice(start, start + rows.shape[0]), found
        start += rows.shape[0]


def write(path: Path, arranged: Arranged, streamed: Streamed, hidden: mx.array) -> None:
    """All logits of hidden (T, hidden) into a .npy file, (T, vocab_size) float32.

    Raises:
        OSError: the disk is full; then there is no file.
    """
    try:
        _lay_out(path, (hidden.shape[0], arranged.config.vocab_size))
        file = np.lib.format.open_memmap(path, mode="r+")
        for columns, logits in blocks(arranged, streamed, hidden):
            file[:, columns] = logits
        file.flush()
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _lay_out(path: Path, shape: tuple[int, int]) -> None:
    """A .npy file of float32 zeros whose bytes the disk has.

    A map of a file with holes is no way to write: where the disk is full, the system ends the
    process (SIGBUS).
    """
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        allocate(file.fileno(), file.tell(), shape[0] * shape[1] * 4)


def log_normaliser(parts: Iterator[tuple[slice, Floats]], count: int) -> Doubles:
    """log of the sum of exponentials of each of `count` positions."""
    total = np.full(count, -np.inf)
    for _, logits in parts:
        top = logits.max(axis=-1, keepdims=True).astype(np.float64)
        found = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1, dtype=np.float64))
        total = np.logaddexp(total, found)
    return total


def divergences(
    arranged: Arranged,
    streamed: Streamed,
    reference: mx.array,
    others: mx.array,
    method: Method | None = None,
) -> Doubles:
    """KL(reference || other), mean over positions, in nats, for each of several others.

    Args:
        reference: (P, hidden) normed hidden states.
        others: (S, P, hidden) of the same positions.
        method: how the output projection of the others is quantised; None: not.
    """
    count, positions, hidden = others.shape
    flat = others.reshape(-1, hidden)
    normaliser = log_normaliser(blocks(arranged, streamed, reference), positions)
    theirs = np.full(count * positions, -np.inf)
    crossed = np.zeros(count * positions)
    own = np.zeros(positions)
    plain = blocks(arranged, streamed, reference)
    for (_, kept), (_, found) in zip(plain, blocks(arranged, streamed, flat, method), strict=True):
        shares = np.exp(kept - normaliser[:, None])
        own += (shares * (kept - normaliser[:, None])).sum(axis=-1)
        theirs = np.logaddexp(theirs, log_normaliser(iter([(slice(0), found)]), len(found)))
        crossed += (np.tile(shares, (count, 1)) * found).sum(axis=-1)
    kl = np.tile(own, count) - (crossed - theirs)
    return np.maximum(kl, 0).reshape(count, positions).mean(axis=-1)
