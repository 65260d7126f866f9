"""Rows of logits cut into blocks of 128 tokens, and the few largest of a row found through them.

Knows nothing of requests. Every row is padded to whole blocks, with one column at least to spare:
then a row lies at the same offset modulo the vector width whatever the batch, so that its values
are rounded as they are when it is alone; and entries of padded tables can be sent to the spare
column, where they do no harm.
"""

import mlx.core as mx

BLOCK = 128


def padded_width(vocab_size: int) -> int:
    """Columns of a padded row: whole blocks, and more than the vocabulary has tokens."""
    return (vocab_size // BLOCK + 1) * BLOCK


def row_padding(num_rows: int, vocab_size: int) -> mx.array:
    """(R, padded_width(V) - V) float32, all -inf: what pad_rows adds."""
    return mx.full((num_rows, padded_width(vocab_size) - vocab_size), -mx.inf, mx.float32)


def pad_rows(logits: mx.array, padding: mx.array | None = None) -> mx.array:
    """(R, V) of any float dtype -> (R, padded_width(V)) float32, -inf beyond the vocabulary.

    `padding` is a row_padding of the same shape that was kept.
    """
    if padding is None:
        padding = row_padding(*logits.shape)
    return mx.concatenate([logits.astype(mx.float32), padding], axis=-1)


def in_blocks(rows: mx.array) -> mx.array:
    """(R, width) -> (R, width / 128, 128)"""
    return rows.reshape(rows.shape[0], -1, BLOCK)


def largest_values(rows: mx.array, k: int) -> mx.array:
    """The k largest values of each row, largest last: (R, width) -> (R, k)."""
    if _through_blocks(rows, k):
        rows = _gather_blocks(rows, _leading_blocks(rows, k))
    return mx.sort(mx.topk(rows, k, axis=-1), axis=-1)


def largest_entries(rows: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest values of each row and their columns, largest first; ties: lower column first.

    Args:
        rows: (R, width) float32
        k: from 1 to width.

    Returns:
        values (R, k) float32, columns (R, k) int32
    """
    if not _through_blocks(rows, k):
        columns = mx.argsort(-rows, axis=-1)[:, :k]
        return mx.take_along_axis(rows, columns, axis=-1), columns.astype(mx.int32)
    # In the order of their ids, so that position among the candidates orders as columns do.
    blocks = mx.sort(_leading_blocks(rows, k), axis=-1)  # (R, k)
    candidates = _gather_blocks(rows, blocks)  # (R, k * 128)
    picked = mx.argsort(-candidates, axis=-1)[:, :k]
    columns = mx.take_along_axis(blocks, picked // BLOCK, axis=-1) * BLOCK + picked % BLOCK
    return mx.take_along_axis(candidates, picked, axis=-1), columns.astype(mx.int32)


def _through_blocks(rows: mx.array, k: int) -> bool:
    """Whether k blocks are so much less than the row that finding them first is worth it."""
    return 2 * k * BLOCK <= rows.shape[-1]


def _leading_blocks(rows: mx.array, k: int) -> mx.array:
    """(R, k) the k blocks with the largest maxima: the k largest values lie in them.

    A value outside is at most its block's maximum, and so at most each of k maxima inside.
    """
    return mx.argsort(-in_blocks(rows).max(axis=-1), axis=-1)[:, :k]


def _gather_blocks(rows: mx.array, blocks: mx.array) -> mx.array:
    """(R, k * 128) the values of the named blocks."""
    picked = mx.take_along_axis(in_blocks(rows), blocks[:, :, None], axis=1)  # (R, k, 128)
    return picked.reshape(rows.shape[0], -1)
