"""The parts of sampling: penalties and biases that change single logits, and cuts that drop tokens.

A part is a function from logits to logits. It changes all of its P rows at once, padded to `width`
columns. `PARTS` lists the parts. A cut gives -inf to tokens that are not kept. All cuts but typical
sampling compare values with a threshold: equal values stay or go together, whatever their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from .draw import largest_values, padded_width, stream_of, total_weight, uniforms
from .tokens import Repeats, TokenBuffer

T = TypeVar("T")


class SamplerSlot:
    """One running request, as the sampler knows it.

    Args:
        stop_ids: the tokens that end the answer.
        breakers: tokens over which no repetition reaches, for DRY.

    Attributes:
        memories: the request's tokens as each part needs them; each has `append(token_id)`.
        cuts_in_kernel: the sampling kernel may do its fused parts: no other part comes after them.
    """

    __slots__ = ("breakers", "cuts_in_kernel", "memories", "params", "parts", "stop_ids", "stream")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        self.params, self.stream = params, stream_of(params.seed)
        self.stop_ids, self.breakers = stop_ids, breakers
        self.parts = [part for part in PARTS if part.concerns(params)]
        self.cuts_in_kernel = AFTER_FUSED.isdisjoint(self.parts)
        self.memories: dict[SamplerPart, Any] = {
            part: part.memory(self, prompt_ids, output_ids)
            for part in self.parts
            if part.memory is not None
        }


class SamplerStep(NamedTuple):
    """Which token each of the R rows of a batch is to get."""

    counts: NDArray[np.int64]  # (R,) its index: how many tokens the answer has before it
    recent: mx.array | None  # (R, n) int32 newest tokens that no memory has yet, then -1


class SamplerPart(NamedTuple):
    """A part of sampling: one row in the table of parts.

    `SamplerStep.recent` has the newest tokens of a row if only the device knows them, or if they
    are proposals. Logits must be the same, bit for bit, whether a token is in the memory or among
    the recent ones, and with any other rows in the batch.
    """

    # Logits (P, width) -> (P, width); the step is that of the whole batch.
    change: Callable[[mx.array, "PartRows", SamplerStep], mx.array]
    concerns: Callable[[SamplingParams], bool]  # whether a request needs it
    # Of a request: its slot, prompt and answer so far -> a memory.
    memory: Callable[[SamplerSlot, Sequence[int], Sequence[int]], Any] | None = None
    fused: bool = False  # the sampling kernel does the same


@dataclass(slots=True)
class PartRows:
    """The P rows of a batch that one part changes; kept as long as the batch stays the same."""

    part: SamplerPart
    places: NDArray[np.int64]  # (P,) in the batch
    device_places: mx.array | None  # (P,) int32 the same; None: all rows, in order
    slots: list[SamplerSlot]  # (P,) one for each row
    spare: int  # a column that stands for no token; its logit is -inf
    memories: list[Any]  # (P,) what the part keeps of each request; none for parts without
    _made: dict[object, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        part: SamplerPart, places: Sequence[int], slots: Sequence[SamplerSlot], spare: int
    ) -> "PartRows":
        array = np.array(places)
        device_places = None if len(places) == len(slots) else mx.array(array.astype(np.int32))
        row_slots = [slots[place] for place in places]
        memories = [] if part.memory is None else [slot.memories[part] for slot in row_slots]
        return PartRows(part, array, device_places, row_slots, spare, memories)

    def apply(self, logits: mx.array, step: SamplerStep) -> mx.array:
        """Logits (R, width) of the whole batch with these rows changed."""
        places = self.device_places
        if places is None:
            return self.part.change(logits, self, step)
        logits[places] = self.part.change(logits[places], self, step)
        return logits

    def counts(self, step: SamplerStep) -> NDArray[np.int64]:
        """(P,) counts of these rows."""
        return step.counts[self.places]

    def recent(self, step: SamplerStep) -> mx.array | None:
        """(P, n) recent tokens of these rows."""
        places, recent = self.device_places, step.recent
        return recent if recent is None or places is None else recent[places]

    def settings(self, name: str) -> list[Any]:
        """(P,) the setting of this name of each row."""
        return [getattr(slot.params, name) for slot in self.slots]

    def column(self, name: str) -> mx.array:
        """(P, 1) float32 the setting of this name of each row."""
        if name not in self._made:
            self._made[name] = mx.array(self.settings(name), mx.float32)[:, None]
        return self._made[name]

    def once(self, make: Callable[["PartRows"], T]) -> T:
        """The result of a function of these rows. It is called once for each plan."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]


TINY = 1e-30  # in place of values above 0 that would be 0 in float32
ALL = 2**30  # tokens of a window that holds every context
MAX_EXPONENT = 1024  # tokens by which a repetition may exceed the allowed length and count for it
MAX_AMOUNT = 1e30

# -- functions of the caller ------------------------------------------------------------------


class TokenHistory:
    """The tokens of one request, prompt and answer, for its `logits_processors`."""

    __slots__ = ("_num_prompt", "_tokens")

    def __init__(
        self, slot: SamplerSlot, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        self._num_prompt = len(prompt_ids)
        self._tokens = TokenBuffer([*prompt_ids, *output_ids])

    def append(self, token_id: int) -> None:
        self._tokens.append(token_id)

    def before(self, count: int, recent: mx.array | None) -> mx.array:
        """(N,) int32 the prompt and `count` tokens of the answer; `recent` (n,): the newest."""
        known = mx.array(self._tokens.ids)
        num_recent = self._num_prompt + count - len(self._tokens)
        if recent is None or num_recent == 0:
            return known
        return mx.concatenate([known, recent[:num_recent]])


def process(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Call the `logits_processors` of each row. Tokens that a grammar forbids stay forbidden."""
    recent, size = rows.recent(step), rows.spare
    processed = []
    for place, (slot, count) in enumerate(zip(rows.slots, rows.counts(step), strict=True)):
        newest = None if recent is None else recent[place]
        tokens, row = rows.memories[place].before(int(count), newest), logits[place, None, :size]
        for function in slot.params.logits_processors:
            row = function(tokens, row)
        processed.append(row.reshape(1, size).astype(mx.float32))
    after = mx.pad(mx.concatenate(processed), [(0, 0), (0, logits.shape[-1] - size)])
    return mx.where(logits > -mx.inf, after, -mx.inf)


def choose(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Keep the token that the `sampler` of each row takes, and no other."""
    tokens = []
    for place, sampler in enumerate(rows.settings("sampler")):
        row = logits[place, None, : rows.spare]
        token = sampler(row - mx.logsumexp(row, axis=-1, keepdims=True))
        tokens.append(mx.array(token, mx.int32).reshape(1, 1))
    columns = mx.arange(logits.shape[-1])[None]
    return mx.where(columns == mx.concatenate(tokens), 0.0, -mx.inf)


# -- repetition, presence, frequency ----------------------------------------------------------


def repetition_memory(
    slot: SamplerSlot, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> TokenBuffer:
    window = slot.params.repetition_window
    return TokenBuffer([*prompt_ids, *output_ids], last=None if window < 0 else window)


def repetition(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Divide logits above 0 and multiply the others, once for each distinct token that came before.

    The penalty of Keskar et al., "CTRL", 2019, over the last `repetition_window` tokens of prompt
    and answer, as llama.cpp's `repeat_last_n` and mlx-lm's `repetition_context_size`.
    """
    tokens = _tokens(rows, step)
    real = tokens >= 0
    from_end = mx.cumsum(real.astype(mx.int32), axis=-1, reverse=True)  # the newest token: 1
    ids = mx.where(real & (from_end <= rows.once(_windows)), tokens, rows.spare)
    before, strength = mx.take_along_axis(logits, ids, axis=-1), rows.once(_strengths)
    after = mx.where(before > 0, before / strength, before * strength)
    return mx.put_along_axis(logits, ids, after, axis=-1)


def occurrences(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    tokens = _tokens(rows, step)
    ids = mx.where(tokens >= 0, tokens, rows.spare)
    place = mx.arange(len(rows.slots))[:, None]
    counts = mx.zeros_like(logits).at[place, ids].add(1.0)  # (P, width)
    logits = logits - rows.column("frequency_penalty") * counts
    return mx.where(counts > 0, logits - rows.column("presence_penalty"), logits)


def _tokens(rows: PartRows, step: SamplerStep) -> mx.array:
    """(P, N + n) the tokens in each memory, then the recent ones; -1 where there is none."""
    known = [memory.ids for memory in rows.memories]
    table = np.full((len(known), max(1, *map(len, known))), -1, dtype=np.int32)
    for row, ids in enumerate(known):
        table[row, : len(ids)] = ids
    tokens = mx.array(table)
    recent = rows.recent(step)
    return tokens if recent is None else mx.concatenate([tokens, recent], axis=-1)


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


def biases(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Add `logit_bias`, and forbid end tokens until the answer has `min_tokens`."""
    table = rows.once(_bias_table)
    is_early = rows.counts(step)[:, None] < table.min_tokens
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


def repeats(slot: SamplerSlot, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Repeats:
    return Repeats([*prompt_ids, *output_ids], slot.breakers)


class DryTable(NamedTuple):
    """The settings of P rows with DRY."""

    amounts: mx.array  # (P, M) float32 to subtract, by tokens beyond what is allowed, from -1
    allowed: mx.array  # (P, 1) int32
    windows: mx.array  # (P, 1) int32 newest tokens that are looked at
    breakers: mx.array  # (P, width) bool


def dry(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Make tokens less probable that would continue a long repetition.

    A token that would extend a repetition of L tokens loses
    `multiplier * base ** (L - allowed_length)` where L is at least `allowed_length`. A repetition
    never reaches over a sequence breaker, and no breaker is penalised. Source: P. E. Weidmann,
    "DRY: a modern repetition penalty", text-generation-webui, pull request 5677, 2024; as in
    llama.cpp (`dry_*`).
    """
    table = rows.once(_dry_table)
    tokens, lengths = _repeated(rows.memories, table, rows.recent(step))
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
    for row, memory in enumerate(memories):  # the last token of each in the last column
        ids[row, longest - len(memory) :] = memory.ids
        known[row, longest - len(memory) :] = memory.lengths
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
    SamplerPart(process, lambda p: bool(p.logits_processors), memory=TokenHistory),
    SamplerPart(
        repetition,
        lambda p: p.repetition_penalty != 1 and p.repetition_window != 0,
        memory=repetition_memory,
    ),
    SamplerPart(
        occurrences,
        lambda p: p.presence_penalty != 0 or p.frequency_penalty != 0,
        memory=lambda slot, prompt_ids, output_ids: TokenBuffer(output_ids),
    ),
    SamplerPart(biases, lambda p: bool(p.logit_bias) or p.min_tokens > 0),
    SamplerPart(dry, lambda p: p.dry_multiplier != 0 and p.dry_penalty_last_n != 0, memory=repeats),
)


SORTED = 256  # where halving costs more than it saves
K_STEP = 64  # top_k is rounded up to this: whole vectors, and few shapes
KEEP_ALL = 2.0  # a top_p that no mass reaches, whatever the rounding
LOWEST = mx.finfo(mx.float32).min
EXCLUDING = np.uint64(0x3C6EF372FE94F82B)  # XTC has a stream of random numbers of its own
# Of two allowed tokens the lower one lies exactly two deviations below the higher: without a
# margin the last bit of a sum would decide, which depends on what shares the step.
SIGMA_MARGIN = 1e-4


def temperatures(rows: PartRows) -> mx.array:
    """(P, 1) float32, above 0."""
    return mx.array([max(t, TINY) for t in rows.settings("temperature")], mx.float32)[:, None]


def weights_of(logits: mx.array, temperature: mx.array) -> mx.array:
    """(P, width) unnormalised probabilities: the most probable token has exactly 1.

    A row that is all -inf gives zeros, not NaN.
    """
    return _weights(logits, logits.max(axis=-1, keepdims=True), temperature)


def _weights(logits: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    return mx.exp((logits - mx.maximum(highest, LOWEST)) / temperature)


def top_n_sigma(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Keep logits within n standard deviations of the highest, over tokens above -inf.

    Tang et al., "Top-nσ: Not all logits are you need", 2024.
    """
    allowed = logits > -mx.inf
    count = mx.maximum(total_weight(allowed.astype(mx.float32)), 1.0)
    mean = total_weight(mx.where(allowed, logits, 0.0)) / count
    away = mx.where(allowed, logits - mean, 0.0)
    sigma = mx.sqrt(total_weight(away * away) / count)
    reach = (rows.column("top_n_sigma") + SIGMA_MARGIN) * sigma
    return mx.where(logits >= logits.max(axis=-1, keepdims=True) - reach, logits, -mx.inf)


def typical(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Keep the tokens with a surprise nearest the entropy, up to a mass.

    Meister et al., "Locally typical sampling", 2022. Equally typical tokens stay or go together.
    """
    highest = mx.maximum(logits.max(axis=-1, keepdims=True), LOWEST)
    scaled = (logits - highest) / rows.once(temperatures)
    weights = mx.exp(scaled)
    total = total_weight(weights)
    surprise = mx.log(total) - scaled  # of each token; inf where it has no mass
    share = weights / total
    entropy = total_weight(mx.where(share > 0, share * surprise, 0.0))
    away = mx.where(share > 0, mx.abs(surprise - entropy), mx.inf)
    order = mx.argsort(away, axis=-1)
    mass = mx.cumsum(mx.take_along_axis(share, order, axis=-1), axis=-1)
    count = (mass < rows.column("typical_p")).sum(axis=-1, keepdims=True)  # that are not enough
    last = mx.take_along_axis(order, mx.minimum(count, logits.shape[-1] - 1), axis=-1)
    typical = (away <= mx.take_along_axis(away, last, axis=-1)) & (share > 0)
    return mx.where(typical, logits, -mx.inf)


def top_k(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Keep the k highest logits and, of those, the smallest set that reaches top-p.

    The k highest are all that is sorted. They are compared as logits: two of them may have one
    weight.
    """
    max_k, kth = rows.once(_ranks)
    leading = largest_values(logits, max_k)  # (P, max_k), rising
    floor, goals = mx.take_along_axis(leading, kth, axis=-1), rows.once(_top_ps)
    if goals is not None:
        weights = _weights(leading, leading[:, -1:], rows.once(temperatures))
        above = mx.cumsum(mx.where(leading > floor, weights, 0.0), axis=-1)[:, -1:]
        ties = (logits == floor).sum(axis=-1, keepdims=True)  # with the k-th; all have a share
        goal = goals * (above + ties * mx.take_along_axis(weights, kth, axis=-1))
        lowest = mx.maximum(_lowest_enough(_mass_above(weights), goal), kth)
        floor = mx.take_along_axis(leading, lowest, axis=-1)
    return mx.where(logits >= floor, logits, -mx.inf)


def _ranks(rows: PartRows) -> tuple[int, mx.array]:
    """How many of the highest values to sort, and the column (P, 1) of the k-th among them."""
    ks = np.array(rows.settings("top_k"), dtype=np.int32)
    max_k = min(-(-int(ks.max()) // K_STEP) * K_STEP, padded_width(rows.spare))
    return max_k, mx.array((max_k - ks)[:, None])


def _top_ps(rows: PartRows) -> mx.array | None:
    """(P, 1) float32 top-p, where it is off more than any mass; None: it is off in all rows."""
    top_ps = np.array(rows.settings("top_p"), dtype=np.float32)  # 1 - 1e-12 is 1, and so off
    limits = np.where(top_ps < 1, top_ps, np.float32(KEEP_ALL))
    return mx.array(limits[:, None]) if (top_ps < 1).any() else None


def top_p(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Keep the smallest set of the most probable tokens that reaches a mass of top-p."""
    weights = weights_of(logits, rows.once(temperatures))
    return mx.where(weights >= _top_p_floor(weights, rows.column("top_p")), logits, -mx.inf)


def min_p(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """Keep tokens that have at least this share of the most probable token's probability."""
    highest = logits.max(axis=-1, keepdims=True)
    reach = rows.once(temperatures) * mx.log(rows.column("min_p"))  # at most 0
    return mx.where(logits >= highest + reach, logits, -mx.inf)


def xtc(logits: mx.array, rows: PartRows, step: SamplerStep) -> mx.array:
    """With some probability, exclude all tokens that reach a threshold, except the least probable.

    P. E. Weidmann, "Exclude top choices", text-generation-webui, pull request 6335, 2024.
    """
    weights = weights_of(logits, rows.once(temperatures))
    allowed = weights > 0
    likely = allowed & (weights >= rows.column("xtc_threshold") * total_weight(weights))
    least = mx.where(likely, weights, mx.inf).min(axis=-1, keepdims=True)
    streams = np.array([slot.stream for slot in rows.slots], dtype=np.uint64)
    random = uniforms(streams ^ EXCLUDING, rows.counts(step))
    chance = np.array(rows.settings("xtc_probability"), dtype=np.float32)
    now = mx.array((random < chance)[:, None])
    return mx.where(allowed & ~(now & likely & (weights > least)), logits, -mx.inf)


def _top_p_floor(weights: mx.array, top_p: mx.array) -> mx.array:
    """(P, 1) the smallest weight in the smallest set with at least top_p of the whole mass.

    Floats that are at least 0 order as the integers of the same bits do, and integers sort faster.
    """
    goal = top_p * total_weight(weights)
    bits, above = weights.view(mx.int32), None
    # MLX partitions in linear time on the CPU; on a GPU its partition is a sort of the whole row.
    if mx.default_device() == mx.cpu:
        bits, above = _half_that_decides(bits, goal)
    rising = mx.sort(bits, axis=-1).view(mx.float32)
    mass = _mass_above(rising)
    mass = mass if above is None else above + mass
    return mx.take_along_axis(rising, _lowest_enough(mass, goal), axis=-1)


def _mass_above(rising: mx.array) -> mx.array:
    """(P, n) values that rise -> (P, n - 1) mass of each but the first and of all behind it."""
    return mx.cumsum(rising, axis=-1, reverse=True)[:, 1:]


def _lowest_enough(mass: mx.array, goal: mx.array) -> mx.array:
    """(P, 1) column of the lowest value with a mass, of _mass_above, of at least `goal`.

    Column 0 where no mass is: the lowest value comes when no other is left, whatever its own.
    """
    return (mass >= goal).sum(axis=-1, keepdims=True)


def _half_that_decides(bits: mx.array, goal: mx.array) -> tuple[mx.array, mx.array | None]:
    """Halve the values repeatedly: keep the half in which the mass from the top reaches `goal`.

    This is quickselect for a mass, with the same shapes for all rows. A row keeps its upper half
    where the mass from there up is enough, else its lower half.

    Args:
        bits: (P, width) int32, bits of floats that are at least 0.
        goal: (P, 1) float32

    Returns:
        (P, at most SORTED) bits and the (P, 1) float32 mass of larger values; None: there are none.
    """
    width, above = bits.shape[-1], None
    halvings = max(0, (width - 1) // SORTED).bit_length()
    padding = -width % (1 << halvings)
    if padding:
        bits = mx.pad(bits, [(0, 0), (0, padding)])  # weights of 0 change no mass
    for _ in range(halvings):
        lower, upper = mx.split(mx.partition(bits, bits.shape[-1] // 2, axis=-1), 2, axis=-1)
        mass = mx.cumsum(upper.view(mx.float32), axis=-1)[:, -1:]
        mass = mass if above is None else above + mass
        enough = mass >= goal
        bits = mx.where(enough, upper, lower)
        above = mx.where(enough, 0.0 if above is None else above, mass)
    return bits, above


# In the order of their work. A new sampler is a function and a row here.
CUTS = (
    SamplerPart(top_n_sigma, lambda p: p.top_n_sigma > 0 and not p.greedy),
    SamplerPart(typical, lambda p: p.typical_p < 1 and not p.greedy),
    SamplerPart(top_k, lambda p: p.top_k > 0 and not p.greedy, fused=True),
    # 1 - 1e-12 is 1 in float32, and so off
    SamplerPart(
        top_p, lambda p: bool(np.float32(p.top_p) < 1) and not (p.top_k or p.greedy), fused=True
    ),
    SamplerPart(min_p, lambda p: p.min_p > 0 and not p.greedy, fused=True),
    SamplerPart(xtc, lambda p: p.xtc_probability > 0 and not p.greedy),
)

PARTS = (*PENALTIES, *CUTS, SamplerPart(choose, lambda p: p.sampler is not None))
LAST_FUSED = [part for part in PARTS if part.fused][-1]
AFTER_FUSED = set(PARTS[PARTS.index(LAST_FUSED) + 1 :])
