"""Parts that change single logits: repetition, presence and frequency penalties, biases, and DRY.

Each function is a part as `rows.Part` describes it: P rows, padded to `width` columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .draw import padded_width
from .rows import Part, PartRows, Slot, Turn
from .tokens import Ints, TokenBuffer

TINY = 1e-30  # in place of values above 0 that would be 0 in float32
ALL = 2**30  # tokens of a window that holds every context
MAX_EXPONENT = 1024  # tokens by which a repetition may exceed the allowed length and count for it
MAX_AMOUNT = 1e30

# -- repetition, presence, frequency ----------------------------------------------------------


def repetition_memory(slot: Slot) -> TokenBuffer:
    """The tokens of prompt and answer that the repetition penalty looks at."""
    window = slot.params.repetition_window
    return TokenBuffer([*slot.prompt_ids, *slot.output_ids], last=None if window < 0 else window)


def answer_memory(slot: Slot) -> TokenBuffer:
    """The tokens of the answer."""
    return TokenBuffer(slot.output_ids)


def repetition(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Divide logits above 0 and multiply the others, once for each distinct token that came before.

    The penalty of Keskar et al., "CTRL", 2019, over the last `repetition_window` tokens of prompt
    and answer, as llama.cpp's `repeat_last_n` and mlx-lm's `repetition_context_size`.
    """
    tokens = _tokens(rows, turn)
    there = tokens >= 0
    from_end = mx.cumsum(there.astype(mx.int32), axis=-1, reverse=True)  # the newest token: 1
    ids = mx.where(there & (from_end <= rows.once(_windows)), tokens, rows.spare)
    before, strength = mx.take_along_axis(logits, ids, axis=-1), rows.once(_strengths)
    after = mx.where(before > 0, before / strength, before * strength)
    return mx.put_along_axis(logits, ids, after, axis=-1)


def occurrences(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Subtract the frequency penalty per occurrence in the answer, the presence penalty once."""
    tokens = _tokens(rows, turn)
    ids = mx.where(tokens >= 0, tokens, rows.spare)
    place = mx.arange(len(rows.slots))[:, None]
    counts = mx.zeros_like(logits).at[place, ids].add(1.0)  # (P, width)
    logits = logits - rows.column("frequency_penalty") * counts
    return mx.where(counts > 0, logits - rows.column("presence_penalty"), logits)


def _tokens(rows: PartRows, turn: Turn) -> mx.array:
    """(P, N + n) the tokens in each memory, then the recent ones; -1 where there is none."""
    known = [memory.ids for memory in rows.memories]
    table = np.full((len(known), max(1, *map(len, known))), -1, dtype=np.int32)
    for row, ids in zip(table, known, strict=True):
        row[: len(ids)] = ids
    tokens = mx.array(table)
    return tokens if turn.recent is None else mx.concatenate([tokens, turn.recent], axis=-1)


def _windows(rows: PartRows) -> mx.array:
    """(P, 1) int32 the tokens that the repetition penalty looks at."""
    return _column([ALL if size < 0 else size for size in rows.settings("repetition_window")])


def _strengths(rows: PartRows) -> mx.array:
    """(P, 1) the repetition penalties in float32's range."""
    strengths = [min(max(s, TINY), 1 / TINY) for s in rows.settings("repetition_penalty")]
    return mx.array(strengths, mx.float32)[:, None]


def _column(values: Sequence[int]) -> mx.array:
    """(P, 1) int32"""
    return mx.array(np.array(values, dtype=np.int32)[:, None])


# -- biases -----------------------------------------------------------------------------------


class BiasTable(NamedTuple):
    """Amounts to add to the logits of P rows, of at most n tokens each."""

    ids: mx.array  # (P, n) int32, padded with a column that stands for no token
    early: NDArray[np.float32]  # (P, n) what is added until `min_tokens` are there
    later: NDArray[np.float32]  # (P, n) what is added then
    min_tokens: NDArray[np.int64]  # (P, 1)


def biases(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Add `logit_bias`, and forbid end tokens until the answer has `min_tokens`."""
    table = rows.once(_bias_table)
    is_early = turn.counts[:, None] < table.min_tokens
    added = np.where(is_early, table.early, table.later)
    if not added.any():
        return logits
    place = mx.arange(len(rows.slots))[:, None]
    return logits.at[place, table.ids].add(mx.array(added))


def _bias_table(rows: PartRows) -> BiasTable:
    biases, banned = rows.settings("logit_bias"), [sorted(slot.stop_ids) for slot in rows.slots]
    pairs = list(zip(biases, banned, strict=True))
    shape = (len(pairs), max(1, *(len(bias) + len(ids) for bias, ids in pairs)))
    ids = np.full(shape, rows.spare, dtype=np.int32)
    early, later = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for row, (bias, ends) in enumerate(pairs):
        count, stop = len(bias), len(bias) + len(ends)
        ids[row, :stop] = [*bias, *ends]
        early[row, :count] = later[row, :count] = list(bias.values())
        early[row, count:stop] = -np.inf
    min_tokens = np.array(rows.settings("min_tokens"))[:, None]
    return BiasTable(mx.array(ids), early, later, min_tokens)


# -- DRY --------------------------------------------------------------------------------------


class Repeats:
    """The tokens of one request, prompt and answer, and how much of them the newest ones repeat.

    Attributes:
        breakers: ids of tokens that break a repetition.
    """

    def __init__(self, slot: Slot) -> None:
        ids = [*slot.prompt_ids, *slot.output_ids]
        self.breakers = slot.breakers
        self._size = len(ids)
        self._ids = np.full(max(2 * len(ids), 64), -1, dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._lengths = np.zeros(len(self._ids), dtype=np.int32)
        self._lengths[: len(ids)] = common_suffixes(ids, slot.breakers)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> Ints:
        """(N,) the tokens."""
        return self._ids[: self._size]

    @property
    def lengths(self) -> Ints:
        """(N,) how many tokens that end at each place equal the newest ones, back to a breaker.

        The last place has 0.
        """
        return self._lengths[: self._size]

    def append(self, token_id: int) -> None:
        """Add one token."""
        size = self._size
        if size == len(self._ids):
            self._ids = np.pad(self._ids, (0, size), constant_values=-1)
            self._lengths = np.pad(self._lengths, (0, size))
        before = np.append(np.int32(0), self._lengths[: size - 1]) if size else self._lengths[:0]
        again = (self._ids[:size] == token_id) & (token_id not in self.breakers)
        self._lengths[:size] = np.where(again, before + 1, 0)
        self._ids[size], self._lengths[size] = token_id, 0
        self._size += 1


def common_suffixes(ids: Sequence[int], breakers: frozenset[int]) -> Ints:
    """(N,) how many tokens that end at each place equal the last ones; 0 at the last place.

    None of them reaches over a breaker. Linear time: Gusfield's Z algorithm (1997) on the reversed
    tokens.
    """
    last = list(reversed(ids))
    free = next((i for i, token_id in enumerate(last) if token_id in breakers), len(last))
    found = np.zeros(len(last), dtype=np.int32)
    left = right = 0
    for i in range(1, len(last)):
        length = min(right - i, int(found[i - left])) if i < right else 0
        while i + length < len(last) and last[length] == last[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.minimum(found[::-1], free)


class DryTable(NamedTuple):
    """The settings of P rows with DRY."""

    amounts: mx.array  # (P, M) float32 to subtract, by tokens beyond what is allowed, from -1
    allowed: mx.array  # (P, 1) int32
    windows: mx.array  # (P, 1) int32 newest tokens that are looked at
    breakers: mx.array  # (P, width) bool


def dry(logits: mx.array, rows: PartRows, turn: Turn) -> mx.array:
    """Make tokens less probable that would repeat what stood before at length.

    A token that would extend a repetition of L tokens loses
    `multiplier * base ** (L - allowed_length)` where L is at least `allowed_length`. A repetition
    never reaches over a sequence breaker, and no breaker is penalised. Source: P. E. Weidmann,
    "DRY: a modern repetition penalty", text-generation-webui, pull request 5677, 2024; as in
    llama.cpp (`dry_*`).
    """
    table = rows.once(_dry_table)
    tokens, lengths = _repeated(rows.memories, table, turn.recent)
    following, lengths = tokens[:, 1:], lengths[:, :-1]  # (P, N - 1)
    columns = mx.where(following >= 0, following, rows.spare)
    breaks = mx.take_along_axis(table.breakers, columns, axis=-1)
    beyond = mx.clip(lengths - table.allowed + 1, 0, table.amounts.shape[-1] - 1)
    amounts = mx.take_along_axis(table.amounts, mx.where(breaks, 0, beyond), axis=-1)
    place = mx.arange(len(rows.slots))[:, None]
    return logits - mx.zeros_like(logits).at[place, columns].maximum(amounts)


def _dry_table(rows: PartRows) -> DryTable:
    masks = np.zeros((len(rows.slots), padded_width(rows.spare)), dtype=np.bool_)
    for mask, slot in zip(masks, rows.slots, strict=True):
        mask[list(slot.breakers)] = True
    pairs = zip(rows.settings("dry_multiplier"), rows.settings("dry_base"), strict=True)
    with np.errstate(over="ignore"):
        amounts = [m * np.float64(base) ** np.arange(MAX_EXPONENT + 1) for m, base in pairs]
    table = np.minimum(np.pad(np.stack(amounts), ((0, 0), (1, 0))), MAX_AMOUNT)
    return DryTable(
        amounts=mx.array(table.astype(np.float32)),
        allowed=_column(rows.settings("dry_allowed_length")),
        windows=_column([ALL if n < 0 else n for n in rows.settings("dry_penalty_last_n")]),
        breakers=mx.array(masks),
    )


def _repeated(
    memories: Sequence[Repeats], table: DryTable, recent: mx.array | None
) -> tuple[mx.array, mx.array]:
    """(P, N) tokens with the recent ones, -1 where there is none, and what they repeat."""
    longest = max(1, *map(len, memories))
    shape = (len(memories), longest)
    ids, known = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for row, each in enumerate(memories):  # the last token of each in the last column
        ids[row, longest - len(each) :] = each.ids
        known[row, longest - len(each) :] = each.lengths
    tokens, lengths = mx.array(ids), mx.array(known)
    end = mx.full((len(memories), 1), longest, mx.int32)
    if recent is not None:
        count = recent.shape[-1]
        tokens = mx.concatenate([tokens, recent], axis=-1)
        lengths = mx.pad(lengths, [(0, 0), (0, count)])
        for number in range(count):
            lengths = _one_more(tokens, lengths, table.breakers, longest + number)
        end = end + (recent >= 0).sum(axis=-1, keepdims=True)
    places = mx.arange(tokens.shape[-1])[None]
    inside = places - mx.maximum(end - table.windows, 0) + 1  # tokens from the window's begin on
    return tokens, mx.clip(lengths, 0, mx.maximum(inside, 0))


def _one_more(tokens: mx.array, lengths: mx.array, breakers: mx.array, place: int) -> mx.array:
    """(P, N) lengths after the token at `place` was added, where there is one."""
    newest = tokens[:, place : place + 1]  # (P, 1)
    before = mx.pad(lengths[:, :-1], [(0, 0), (1, 0)])
    earlier = mx.arange(tokens.shape[-1])[None] < place
    breaks = mx.take_along_axis(breakers, mx.maximum(newest, 0), axis=-1)
    again = (tokens == newest) & earlier & ~breaks
    return mx.where(newest >= 0, mx.where(again, before + 1, 0), lengths)


# In the order of their work. A new penalty is a function and a row here.
PENALTIES = (
    Part(
        repetition,
        lambda p: p.repetition_penalty != 1 and p.repetition_window != 0,
        memory=repetition_memory,
    ),
    Part(
        occurrences,
        lambda p: p.presence_penalty != 0 or p.frequency_penalty != 0,
        memory=answer_memory,
    ),
    Part(biases, lambda p: bool(p.logit_bias) or p.min_tokens > 0),
    Part(dry, lambda p: p.dry_multiplier != 0 and p.dry_penalty_last_n != 0, memory=Repeats),
)
