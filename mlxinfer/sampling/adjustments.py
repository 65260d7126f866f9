"""What changes logits before a token is chosen: penalties, biases, and what a grammar forbids.

Penalties follow from the tokens that an answer holds, so their history is kept here, by slot.

The newest tokens of a row may not be part of its history (`recent`): the host learns of them one
step later, or they are proposals. Logits come out the same bit for bit either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from .draw import padded_width

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
WORD_BITS = 32
TINY = 1e-30  # in place of values above 0 that would be 0 in float32
BITS = np.array([1 << place for place in range(8)], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Followed:
    """Slots (N,) of a batch, and the P of them that have a history."""

    slots: Ints
    places: NDArray[np.int64]  # (P,) among the slots
    rows: Ints  # (P,) these slots
    counted: NDArray[np.bool_] | None  # (P,) None: none is


class TokenHistory:
    """For each slot with penalties: the distinct tokens of its answer, and how often each occurs.

    A row of `ids` holds `sizes` tokens, then `spare`: the column of a padded row of logits that
    stands for no token. `seen` has a bit for each token of the vocabulary: whether it is in the
    row. Only slots with a frequency penalty are counted.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self._sizes = np.full(1, -1)  # by slot, -1: no history; the last entry: slots beyond
        self._counted = np.zeros(0, dtype=np.bool_)
        self._last: _Followed | None = None  # of the slots observed last
        self._seen = np.zeros((0, spare // 8 + 1), dtype=np.uint8)  # token t: bit t % 8 of t // 8
        self._ids = np.zeros((0, 64), dtype=np.int32)
        self._counts = np.zeros((0, 64), dtype=np.float32)

    def start(self, slot: int, output_ids: Sequence[int], *, counted: bool) -> None:
        """Begin the history of a slot; one that it has is replaced.

        Args:
            slot: of a request.
            output_ids: its answer so far.
            counted: whether to count how often each token occurs.
        """
        ids, times = np.unique(np.asarray(output_ids, dtype=np.int32), return_counts=True)
        num_ids = len(ids)
        self._reserve(num_slots=slot + 1, num_ids=num_ids)
        self._ids[slot] = self.spare
        self._ids[slot, :num_ids] = ids
        self._counts[slot] = 0
        self._counts[slot, :num_ids] = times if counted else 0
        self._seen[slot] = 0
        np.bitwise_or.at(self._seen[slot], ids >> 3, BITS[ids & 7])
        self._sizes[slot] = num_ids
        self._counted[slot] = counted
        self._last = None

    def stop(self, slot: int) -> None:
        """Forget the history of a slot, if it has one."""
        if slot < len(self._sizes):
            self._sizes[slot] = -1
            self._last = None

    def observe(self, slots: Ints, token_ids: Ints) -> None:
        """Add one token (N,) to the history of each slot (N,) that has one.

        Args:
            slots: all different, -1: no slot. Cheapest as the same array, never changed, while the
                batch is the same.
            token_ids: of each slot.
        """
        if self._last is None or self._last.slots is not slots:
            self._last = self._followed(slots)
        rows, counted = self._last.rows, self._last.counted
        if not len(rows):
            return
        tokens = token_ids[self._last.places]
        byte, bit = tokens >> 3, BITS[tokens & 7]
        seen = self._seen[rows, byte]
        self._seen[rows, byte] = seen | bit
        new = (seen & bit) == 0
        self._add(rows[new], tokens[new])
        if counted is not None and (again := counted & ~new).any():
            self._count(rows[again], tokens[again])

    def ids(self, slots: NDArray[np.int64]) -> Ints:
        """(P, N) distinct ids, as wide as the longest of these histories."""
        return self._ids[slots, : self._width(slots)]

    def counts(self, slots: NDArray[np.int64]) -> Floats:
        """(P, N) how often each of the `ids` is there; 0 in rows that are not counted."""
        return self._counts[slots, : self._width(slots)]

    def _followed(self, slots: Ints) -> "_Followed":
        """Which of these slots (N,) have a history, and which of those are counted."""
        beyond = len(self._sizes) - 1
        places = np.flatnonzero(self._sizes[np.minimum(slots, beyond)] >= 0)
        rows = slots[places]
        counted = self._counted[rows]
        return _Followed(slots, places, rows, counted if counted.any() else None)

    def _add(self, slots: Ints, token_ids: Ints) -> None:
        """Add tokens (N,) that are new to these slots."""
        columns = self._sizes[slots]
        self._reserve(num_slots=0, num_ids=int(columns.max(initial=-1)) + 1)
        self._ids[slots, columns] = token_ids
        self._counts[slots, columns] = self._counted[slots]
        self._sizes[slots] = columns + 1

    def _count(self, slots: Ints, token_ids: Ints) -> None:
        """Count tokens (N,) that these slots have already."""
        ids = self._ids[slots, : int(self._sizes[slots].max())]
        self._counts[slots, (ids == token_ids[:, None]).argmax(axis=-1)] += 1

    def _width(self, slots: NDArray[np.int64]) -> int:
        return int(self._sizes[slots].max(initial=1))

    def _reserve(self, *, num_slots: int, num_ids: int) -> None:
        rows, columns = self._ids.shape
        if num_slots <= rows and num_ids <= columns:
            return
        more_rows = max(num_slots, 2 * rows) - rows if num_slots > rows else 0
        more_columns = max(num_ids, 2 * columns) - columns if num_ids > columns else 0
        more = ((0, more_rows), (0, more_columns))
        self._ids = np.pad(self._ids, more, constant_values=self.spare)
        self._counts = np.pad(self._counts, more)
        self._sizes = np.pad(self._sizes, more[0], constant_values=-1)
        self._counted = np.pad(self._counted, more[0])
        self._seen = np.pad(self._seen, (more[0], (0, 0)))


@dataclass(frozen=True, slots=True)
class Repetition:
    """The repetition penalties of P rows, some of which may be 1."""

    strength: mx.array  # (P, width) float32
    prompts: mx.array  # (P, width) bool, see prompt_mask


@dataclass(frozen=True, slots=True)
class Penalties:
    """The P rows of a batch with penalties, and their strengths."""

    slots: NDArray[np.int64]  # (P,)
    places: mx.array | None  # (P,) int32 in the batch; None: all of it, in order
    repetition: Repetition | None  # of these three None: no row has it
    presence: mx.array | None  # (P, 1) float32
    frequency: mx.array | None  # (P, 1) float32


def prompt_mask(prompt_ids: Sequence[int], vocab_size: int) -> mx.array:
    """(width,) bool: which tokens a prompt holds.

    A prompt may hold most of the vocabulary and never changes, so it goes to the device once.
    """
    mask = np.zeros(padded_width(vocab_size), dtype=np.bool_)
    mask[np.asarray(prompt_ids, dtype=np.int64)] = True
    return mx.array(mask)


def penalise(
    logits: mx.array, penalties: Penalties, history: TokenHistory, recent: mx.array | None
) -> mx.array:
    """Logits after the penalties: repetition, then frequency and presence.

    Repetition (Keskar et al., "CTRL", 2019) divides logits above 0 and multiplies the others, once
    for each distinct token of prompt and answer. Frequency is subtracted once per occurrence in the
    answer, presence once if there is any.

    Args:
        logits: (R, width) float32, padded: column `spare` of the history is -inf.
        penalties: of P of these rows.
        history: what the host knows of their answers.
        recent: (R, n) int32 the newest tokens of each row that are not in its history, and -1.

    Returns:
        (R, width) float32
    """
    places = penalties.places
    if recent is not None and places is not None:
        recent = recent[places]
    ids, subtracted = _answers(penalties, history, recent)
    rows = logits if places is None else logits[places]  # (P, width)
    again = rows  # as if every token came before
    if penalties.repetition is not None:
        again = repeated(rows, penalties.repetition.strength)
        rows = mx.where(penalties.repetition.prompts, again, rows)
    new = mx.take_along_axis(again, ids, axis=-1)
    for amount in subtracted:
        new = new - amount
    rows = mx.put_along_axis(rows, ids, new, axis=-1)
    if places is None:
        return rows
    logits[places] = rows
    return logits


def strength_of(params: SamplingParams) -> float:
    """A request's repetition penalty in float32's range."""
    return min(max(params.repetition_penalty, TINY), 1 / TINY)


def repeated(logits: mx.array, strength: mx.array) -> mx.array:
    """Logits of tokens that came before, penalised."""
    return mx.where(logits > 0, logits / strength, logits * strength)


def _answers(
    penalties: Penalties, history: TokenHistory, recent: mx.array | None
) -> tuple[mx.array, list[mx.array]]:
    """The tokens (P, N) of the answers, and the amounts to subtract from their logits.

    A token may be in two columns: both subtract the same, so it does not matter which is written.
    Entries without a token name a column that stays -inf: `spare`, or -1, the last one.
    """
    ids = mx.array(history.ids(penalties.slots))
    subtracted = []
    if penalties.frequency is not None:
        counts = mx.array(history.counts(penalties.slots))
        if recent is not None:
            counts, recent = _counted(ids, counts, recent, history.spare)
        subtracted.append(penalties.frequency * counts)
    if penalties.presence is not None:
        subtracted.append(penalties.presence)
    return ids if recent is None else mx.concatenate([ids, recent], axis=-1), subtracted


def _counted(
    ids: mx.array, counts: mx.array, recent: mx.array, spare: int
) -> tuple[mx.array, mx.array]:
    """Counts (P, N + n) that include the recent tokens, and these (P, n) without known ones.

    A recent token that is among the ids is counted in its column there, and `spare` takes its
    place; any other has its count in each of its columns among the recent ones.
    """
    among_ids = ids[:, :, None] == recent[:, None, :]  # (P, N, n)
    among_recent = recent[:, :, None] == recent[:, None, :]  # (P, n, n)
    counts = mx.concatenate([counts + among_ids.sum(axis=-1), among_recent.sum(axis=-1)], axis=-1)
    return counts, mx.where(among_ids.any(axis=1), spare, recent)


@dataclass(frozen=True, slots=True)
class SparseBias:
    """What one request adds to its logits."""

    ids: tuple[int, ...]
    values: tuple[float, ...]  # -inf: only until min_tokens are there
    min_tokens: int


class Biases:
    """The additions of those rows of a batch that have any, as padded tables."""

    def __init__(self, rows: Sequence[int], biases: Sequence[SparseBias], spare: int) -> None:
        """Put the additions of B rows together; `spare` is a column that stands for no token."""
        shape = (len(rows), max(len(bias.ids) for bias in biases))
        ids = np.full(shape, spare, dtype=np.int32)
        values = np.zeros(shape, dtype=np.float32)
        for row, bias in enumerate(biases):
            ids[row, : len(bias.ids)] = bias.ids
            values[row, : len(bias.values)] = bias.values
        self._rows = np.array(rows)  # (B,)
        self._min_tokens = np.array([bias.min_tokens for bias in biases])[:, None]
        self._values = values  # (B, n)
        self._lasting = np.where(np.isinf(values), np.float32(0), values)
        self._has_lasting = bool(self._lasting.any())
        self._device_rows = mx.array(self._rows[:, None], mx.int32)
        self._device_ids = mx.array(ids)
        self._device_lasting = mx.array(self._lasting)

    def apply(self, logits: mx.array, counts: NDArray[np.int64]) -> mx.array:
        """Add them: (R, width) -> (R, width) float32; counts (R,) tokens each answer has."""
        early = counts[self._rows][:, None] < self._min_tokens  # (B, 1)
        if early.any():
            added = mx.array(np.where(early, self._values, self._lasting))
        elif self._has_lasting:
            added = self._device_lasting
        else:
            return logits
        return logits.at[self._device_rows, self._device_ids].add(added)


def num_words(vocab_size: int) -> int:
    """How many uint32 words hold one bit for each of `vocab_size` tokens."""
    return -(-vocab_size // WORD_BITS)


def apply_bitmask(logits: mx.array, mask: mx.array) -> mx.array:
    """Give -inf to every token with the bit 0; a row that forbids nothing has all its bits set.

    Args:
        logits: (R, V)
        mask: (R, ceil(V / 32)) uint32; token t is bit t % 32 of word t // 32.

    Returns:
        (R, V), dtype of logits.
    """
    num_rows, vocab_size = logits.shape
    assert mask.shape == (num_rows, num_words(vocab_size))
    assert mask.dtype == mx.uint32
    bit = mx.left_shift(mx.array(1, mx.uint32), mx.arange(WORD_BITS, dtype=mx.uint32))
    allowed = (mask[:, :, None] & bit) != 0  # (R, words, 32)
    allowed = allowed.reshape(num_rows, -1)[:, :vocab_size]
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))
