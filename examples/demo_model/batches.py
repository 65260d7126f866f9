"""Rows of token ids for training: whole texts side by side, from a seed and a step number."""

from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import conversation, document
from .skills import drill
from .tokenizer import render_chat, render_document, render_drill

PROSE_SHARE = 0.12  # of the texts; they are longer than conversations
DRILL_SHARE = 0.25  # of the texts, from DRILL_FROM on: sums take longer to learn than sentences
DRILL_FROM = 1200  # step
TOKENS_PER_STEP = 2048
ROW_LENGTHS = (128, 128, 128, 128, 128, 128, 512)  # by step; the long rows teach far distances

Tokens = tuple[list[int], list[float]]  # ids, how much each counts in the loss
Batch = tuple[NDArray[np.int32], NDArray[np.float32]]  # ids (B, L + 1), weights (B, L)


def batch(tokenizer: Tokenizer, seed: int, step: int) -> Batch:
    """Return the batch of one step; the same seed and step always give the same one."""
    length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
    rng = Random(f"{seed}/{step}")
    drills = DRILL_SHARE if step >= DRILL_FROM else 0.0
    rows = [_row(tokenizer, rng, length, drills) for _ in range(TOKENS_PER_STEP // length)]
    return _stacked(rows)


def held_out_batch(tokenizer: Tokenizer, num_rows: int = 64, length: int = 192) -> Batch:
    """Return conversations about questions that no training batch contains."""
    rng = Random("held out")
    texts = (render_chat(tokenizer, conversation(rng, held=True)) for _ in count())
    return _stacked([_cut(texts, length) for _ in range(num_rows)])


def _row(tokenizer: Tokenizer, rng: Random, length: int, drills: float) -> Tokens:
    def texts() -> Iterator[Tokens]:
        while True:
            kind = rng.random()
            if kind < PROSE_SHARE:
                yield render_document(tokenizer, document(rng))
            elif kind < PROSE_SHARE + drills:
                yield render_drill(tokenizer, drill(rng))
            else:
                yield render_chat(tokenizer, conversation(rng))

    return _cut(texts(), length)


def _cut(texts: Iterator[Tokens], length: int) -> Tokens:
    """Return texts side by side, as many as a row holds; the last one is cut off."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) <= length:
        more_ids, more_weights = next(texts)
        ids += more_ids
        weights += more_weights
    return ids[: length + 1], weights[1 : length + 1]


def _stacked(rows: list[Tokens]) -> Batch:
    ids = np.array([ids for ids, _ in rows], dtype=np.int32)
    return ids, np.array([weights for _, weights in rows], dtype=np.float32)
