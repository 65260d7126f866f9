"""Rows of token ids for training: whole texts side by side, from a seed and a step number."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import conversation, document
from .skills import drill
from .tokenizer import render_chat, render_document, render_drill
from .tools.conversations import tool_conversation

PROSE_SHARE = 0.04  # of the texts; they are longer than conversations
DRILL_SHARE = 0.2  # of the texts: sums take longer to learn than sentences
TOOL_SHARE = 0.25  # of the texts, and of the tokens nearly half: they are long
ROW_LENGTHS = (256, 256, 512, 512)  # by step; the long rows teach far distances, and tools

Tokens = tuple[list[int], list[float]]  # ids, how much each counts in the loss
Batch = tuple[NDArray[np.int32], NDArray[np.float32]]  # ids (B, L + 1), weights (B, L)


def batch(tokenizer: Tokenizer, seed: int, step: int, num_tokens: int) -> Batch:
    """Return the batch of one step; the same arguments always give the same one."""
    length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
    rng = Random(f"{seed}/{step}")
    return _stacked([_row(tokenizer, rng, length) for _ in range(num_tokens // length)])


def batches(tokenizer: Path, seed: int, first: int, last: int, num_tokens: int) -> Iterator[Batch]:
    """Yield the batches of the steps from `first` up to `last`, made by other processes ahead."""
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    ahead: deque[Future[Batch]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for step in range(first, last):
            ahead.append(pool.submit(_batch_of, tokenizer, seed, step, num_tokens))
            if len(ahead) > 4 * workers:
                yield ahead.popleft().result()
        for made in ahead:
            yield made.result()


def held_out_batch(tokenizer: Tokenizer, num_rows: int = 64, length: int = 192) -> Batch:
    """Return conversations about questions that no training batch contains."""
    rng = Random("held out")
    texts = (render_chat(tokenizer, conversation(rng, held=True)) for _ in count())
    return _stacked([_cut(texts, length) for _ in range(num_rows)])


def _batch_of(tokenizer: Path, seed: int, step: int, num_tokens: int) -> Batch:
    return batch(_tokenizer(tokenizer), seed, step, num_tokens)


@cache
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def _row(tokenizer: Tokenizer, rng: Random, length: int) -> Tokens:
    def texts() -> Iterator[Tokens]:
        while True:
            kind = rng.random()
            if kind < PROSE_SHARE:
                yield render_document(tokenizer, document(rng))
            elif kind < PROSE_SHARE + DRILL_SHARE:
                yield render_drill(tokenizer, drill(rng))
            elif kind < PROSE_SHARE + DRILL_SHARE + TOOL_SHARE:
                yield render_chat(tokenizer, tool_conversation(rng))
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
