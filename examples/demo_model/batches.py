"""Rows of token ids for training: whole texts side by side, from a seed and a step number."""

from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import conversation, document
from .tokenizer import render_chat, render_document

PROSE_SHARE = 0.12  # of the texts; they are longer than conversations
TOKENS_PER_STEP = 2048
ROW_LENGTHS = (128, 128, 128, 128, 128, 128, 512)  # by step; the long rows teach far distances

Batch = tuple[NDArray[np.int32], NDArray[np.float32]]  # ids (B, L + 1), weights (B, L)


def batch(tokenizer: Tokenizer, seed: int, step: int) -> Batch:
    """Return the batch of one step; the same seed and step always give the same one."""
    length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
    rng = Random(f"{seed}/{step}")
    rows = [_row(tokenizer, rng, length, held=False) for _ in range(TOKENS_PER_STEP // length)]
    return _stacked(rows)


def held_out_batch(tokenizer: Tokenizer, num_rows: int = 64, length: int = 192) -> Batch:
    """Return conversations about questions that no training batch contains."""
    rng = Random("held out")
    return _stacked([_row(tokenizer, rng, length, held=True) for _ in range(num_rows)])


def _row(
    tokenizer: Tokenizer, rng: Random, length: int, held: bool
) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) <= length:
        if not held and rng.random() < PROSE_SHARE:
            more = render_document(tokenizer, document(rng))
        else:
            more = render_chat(tokenizer, conversation(rng, held=held))
        ids += more[0]
        weights += more[1]
    return ids[: length + 1], weights[1 : length + 1]


def _stacked(rows: list[tuple[list[int], list[float]]]) -> Batch:
    ids = np.array([ids for ids, _ in rows], dtype=np.int32)
    return ids, np.array([weights for _, weights in rows], dtype=np.float32)
