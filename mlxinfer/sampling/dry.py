"""DRY: tokens that would repeat what stood before at length are made less probable.

Of a token that would extend a repetition of L tokens, `multiplier * base ** (L - allowed_length)`
is subtracted from the logit, where L is at least `allowed_length`. A repetition never reaches over
a sequence breaker, and no breaker is penalised. Source: P. E. Weidmann, "DRY: a modern repetition
penalty", text-generation-webui, pull request 5677, 2024; as llama.cpp has it (`dry_*`).

The newest tokens of a row may be known to the device alone (`recent`), as in `adjustments`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from .draw import padded_width

Ints = NDArray[np.int32]
MAX_EXPONENT = 1024  # tokens by which a repetition may exceed the allowed length and count for it
MAX_AMOUNT = 1e30
ALL = np.int32(2**30)  # a window that every context fits into


class DryHistory:
    """Tokens of one request, prompt and answer, and what of them the newest ones repeat.

    `lengths[j]` is how many tokens that end at place j equal the last ones of all, back to a
    breaker; the last place has 0.

    Args:
        params: how they are penalised.
        breakers: ids of tokens that break a repetition.
        ids: the tokens so far.
    """

    def __init__(
        self, params: SamplingParams, breakers: frozenset[int], ids: Sequence[int]
    ) -> None:
        self.params, self.breakers = params, breakers
        self._size = len(ids)
        self._ids = np.full(max(2 * len(ids), 64), -1, dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._lengths = np.zeros(len(self._ids), dtype=np.int32)
        self._lengths[: len(ids)] = common_suffixes(ids, breakers)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> Ints:
        """(N,) the tokens."""
        return self._ids[: self._size]

    @property
    def lengths(self) -> Ints:
        """(N,) of what is repeated."""
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
    """(N,) how many tokens that end at each place equal the last ones, in linear time (Gusfield's
    Z algorithm, 1997, on the reversed tokens); none across a breaker, and 0 at the last place.
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


@dataclass(frozen=True, slots=True)
class Dry:
    """The P rows of a batch with DRY."""

    slots: tuple[int, ...]
    places: mx.array | None  # (P,) int32 in the batch; None: all of it, in order
    amounts: mx.array  # (P, M) float32 to subtract, by tokens beyond what is allowed, from -1
    allowed: mx.array  # (P, 1) int32
    windows: mx.array  # (P, 1) int32 last tokens that are looked at
    breakers: mx.array  # (P, width) bool


def dry_rows(
    slots: Sequence[int], histories: Mapping[int, DryHistory], vocab_size: int
) -> Dry | None:
    """The rows of a batch with DRY; None: there are none."""
    places = [place for place, slot in enumerate(slots) if slot in histories]
    if not places:
        return None
    found = [histories[slots[place]] for place in places]
    tables = [_amounts(each.params) for each in found]
    longest = max(map(len, tables))
    masks = np.zeros((len(found), padded_width(vocab_size)), dtype=np.bool_)
    for mask, each in zip(masks, found, strict=True):
        mask[list(each.breakers)] = True
    lasts = [each.params.dry_penalty_last_n for each in found]
    return Dry(
        slots=tuple(slots[place] for place in places),
        places=None if len(places) == len(slots) else mx.array(places, mx.int32),
        amounts=mx.array(np.stack([np.pad(t, (0, longest - len(t)), "edge") for t in tables])),
        allowed=_column([each.params.dry_allowed_length for each in found]),
        windows=_column([ALL if last < 0 else last for last in lasts]),
        breakers=mx.array(masks),
    )


def _amounts(params: SamplingParams) -> NDArray[np.float32]:
    """What is subtracted: nothing, then by tokens beyond the allowed length, from 0."""
    with np.errstate(over="ignore"):
        powers = np.float64(params.dry_base) ** np.arange(MAX_EXPONENT + 1)
        amounts = np.minimum(params.dry_multiplier * powers, MAX_AMOUNT)
    return np.append(0.0, amounts).astype(np.float32)


def _column(values: Sequence[int | np.int32]) -> mx.array:
    return mx.array(np.array(values, dtype=np.int32)[:, None])


def apply_dry(
    logits: mx.array,
    dry: Dry,
    histories: Mapping[int, DryHistory],
    recent: mx.array | None,
    spare: int,
) -> mx.array:
    """Logits with the penalties of repetitions.

    Args:
        logits: (R, width) float32, padded.
        dry: of P of these rows.
        histories: by slot.
        recent: (R, n) int32 the newest tokens of each row that are not in its history, then -1.
        spare: a column that stands for no token.

    Returns:
        (R, width) float32
    """
    rows = logits if dry.places is None else logits[dry.places]  # (P, width)
    if recent is not None and dry.places is not None:
        recent = recent[dry.places]
    tokens, lengths = _repeated([histories[slot] for slot in dry.slots], dry, recent)
    following, lengths = tokens[:, 1:], lengths[:, :-1]  # (P, N - 1)
    columns = mx.where(following >= 0, following, spare)
    breaks = mx.take_along_axis(dry.breakers, columns, axis=-1)
    beyond = mx.clip(lengths - dry.allowed + 1, 0, dry.amounts.shape[-1] - 1)
    amounts = mx.take_along_axis(dry.amounts, mx.where(breaks, 0, beyond), axis=-1)
    places = mx.arange(len(rows))[:, None]
    rows = rows - mx.zeros_like(rows).at[places, columns].maximum(amounts)
    if dry.places is None:
        return rows
    logits[dry.places] = rows
    return logits


def _repeated(
    histories: Sequence[DryHistory], dry: Dry, recent: mx.array | None
) -> tuple[mx.array, mx.array]:
    """(P, N) tokens with the recent ones, -1 where there is none, and what they repeat."""
    longest = max(1, *map(len, histories))
    shape = (len(histories), longest)
    ids, known = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for row, each in enumerate(histories):  # the last token of each in the last column
        ids[row, longest - len(each) :] = each.ids
        known[row, longest - len(each) :] = each.lengths
    tokens, lengths = mx.array(ids), mx.array(known)
    end = mx.full((len(histories), 1), longest, mx.int32)
    if recent is not None:
        count = recent.shape[-1]
        tokens = mx.concatenate([tokens, recent], axis=-1)
        lengths = mx.pad(lengths, [(0, 0), (0, count)])
        for number in range(count):
            lengths = _one_more(tokens, lengths, dry.breakers, longest + number)
        end = end + (recent >= 0).sum(axis=-1, keepdims=True)
    places = mx.arange(tokens.shape[-1])[None]
    inside = places - mx.maximum(end - dry.windows, 0) + 1  # tokens from the window's begin to here
    return tokens, mx.clip(lengths, 0, mx.maximum(inside, 0))


def _one_more(tokens: mx.array, lengths: mx.array, breakers: mx.array, place: int) -> mx.array:
    """(P, N) lengths after the token at `place` was added, where there is one."""
    newest = tokens[:, place : place + 1]  # (P, 1)
    before = mx.pad(lengths[:, :-1], [(0, 0), (1, 0)])
    earlier = mx.arange(tokens.shape[-1])[None] < place
    breaks = mx.take_along_axis(breakers, mx.maximum(newest, 0), axis=-1)
    again = (tokens == newest) & earlier & ~breaks
    return mx.where(newest >= 0, mx.where(again, before + 1, 0), lengths)
