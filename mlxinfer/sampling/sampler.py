"""Chooses the next token of every row of a batch. Knows settings and slots, no requests or text.

The choice is a chain of parts, each a function over all rows that need it (`SamplerPart`), and one
draw at the end. A new sampler is a function and a row in the table `parts.PARTS`. On Metal one
kernel does the draw together with the parts marked `fused`, and the grammar's mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams, TokenLogprobs
from ..metal_kernels.bitmask import bitmask, bitmask_variant
from ..metal_kernels.sample import MAX_VOCAB, SETTINGS, sample, sample_variant, settings_array
from ..metal_kernels.variants import ANY_ROWS, DTYPES, KernelUse, ReadyFor, Variant, never
from .draw import (
    PROPOSING,
    Drawn,
    draw,
    in_blocks,
    largest_entries,
    pad_rows,
    padded_width,
    row_padding,
    take_or_redraw,
    uniforms,
)
from .parts import KEEP_ALL, PARTS, TINY, PartRows, SamplerSlot, SamplerStep, weights_of

WORD_BITS = 32
MAX_PLANS = 32  # batches that come again: micro-batches that take turns, numbers of proposals


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Log-probabilities of one step for A rows; n is the most top tokens that one row asks for.

    Lazy until evaluated.
    """

    asked: dict[int, int]  # row of the batch -> how many top tokens it asks for
    chosen: mx.array  # (A,) float32
    top_ids: mx.array | None  # (A, n) int32, most probable first
    top: mx.array | None  # (A, n) float32

    @staticmethod
    def of(logits: mx.array, tokens: mx.array, asked: dict[int, int]) -> "LogprobArrays":
        """Log-probabilities at temperature 1 of the chosen and of the most probable tokens.

        Args:
            logits: (R, V) as the model gave them.
            tokens: (R,) int32 the chosen ones.
        """
        places = mx.array(list(asked), mx.int32)
        rows = pad_rows(logits[places])  # (A, width)
        # In blocks: one sum in float32 over 262,144 tokens is off by 0.0001 to 0.002.
        total = mx.logsumexp(mx.logsumexp(in_blocks(rows), axis=-1), axis=-1, keepdims=True)
        chosen = mx.take_along_axis(rows, tokens[places][:, None], axis=-1) - total
        n = min(max(asked.values()), logits.shape[-1])
        if n == 0:
            return LogprobArrays(asked, chosen[:, 0], None, None)
        values, ids = largest_entries(rows, n)
        return LogprobArrays(asked, chosen[:, 0], ids, values - total)

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.chosen, self.top_ids, self.top) if array is not None]

    def read(self) -> dict[int, TokenLogprobs]:
        """Row of the batch -> its log-probabilities; waits for the arrays.

        A row gets the number that it asks for, or the whole vocabulary where that is smaller.
        """
        chosen, ids, top = (
            [] if array is None else np.array(array).tolist()
            for array in (self.chosen, self.top_ids, self.top)
        )
        by_row = {}
        for place, (row, num) in enumerate(self.asked.items()):
            pairs = zip(ids[place][:num], top[place][:num], strict=True) if num else ()
            by_row[row] = TokenLogprobs(logprob=chosen[place], top=tuple(pairs))
        return by_row


@dataclass(slots=True)
class Sampled:
    """The tokens that one step chose; lazy until evaluated."""

    tokens: mx.array  # (R,) int32
    logprobs: LogprobArrays | None  # None: no row asks for them
    weights: mx.array | None = None  # (D, width) that the drawn rows were drawn with, if kept
    drawn: NDArray[np.int64] | None = None  # (D,) those rows

    def drawn_with(self, row: int) -> mx.array | None:
        """(width,) the weights that the token of a row was drawn with; None: it was not drawn."""
        if self.weights is None or self.drawn is None or row not in self.drawn:
            return None
        return self.weights[int(np.flatnonzero(self.drawn == row)[0])]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The work of the sampler for R rows, kept while the slots of the batch stay the same."""

    before: list[PartRows]  # parts that come before the draw, whatever draws
    fused: list[PartRows]  # parts behind them, unless a kernel draws
    drawn: NDArray[np.int64]  # (D,) rows that are drawn; the others are greedy
    device_drawn: mx.array | None  # (D,) int32 the same; None: all
    temperature: mx.array  # (D, 1) float32
    streams: NDArray[np.uint64]  # (D,)
    settings: NDArray[np.void]  # (R,) SETTINGS for the kernel, counts left out
    logprobs: dict[int, int]  # see `LogprobArrays.asked`
    padding: mx.array  # see row_padding


def make_plan(slots: Sequence[SamplerSlot], vocab_size: int) -> SamplingPlan:
    """The plan of a batch of R rows, one slot for each row.

    Fused parts of a row with parts after them come before the draw, too.
    """
    params = [slot.params for slot in slots]
    before: list[PartRows] = []
    fused: list[PartRows] = []
    for part in PARTS:
        rows = [row for row, slot in enumerate(slots) if part in slot.parts]
        for parts, in_kernel in ((before, False), (fused, True)):
            chosen = [r for r in rows if (part.fused and slots[r].cuts_in_kernel) == in_kernel]
            if chosen:
                parts.append(PartRows.of(part, chosen, slots, vocab_size))
    drawn = np.array([row for row, p in enumerate(params) if not p.greedy], dtype=np.int64)
    temperatures = [max(params[row].temperature, TINY) for row in drawn.tolist()]
    return SamplingPlan(
        before=before,
        fused=fused,
        drawn=drawn,
        device_drawn=None if len(drawn) == len(slots) else mx.array(drawn.astype(np.int32)),
        temperature=mx.array(temperatures, mx.float32)[:, None] if temperatures else mx.zeros(0),
        streams=np.array([slots[row].stream for row in drawn.tolist()], dtype=np.uint64),
        settings=_settings(slots, vocab_size),
        logprobs={row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None},
        padding=row_padding(len(slots), vocab_size),
    )


def _settings(slots: Sequence[SamplerSlot], vocab_size: int) -> NDArray[np.void]:
    """(R,) SETTINGS for the kernel, which cuts no row that was cut before."""
    settings = np.zeros(len(slots), SETTINGS)
    for row, slot in zip(settings, slots, strict=True):
        params = slot.params
        row["temperature"] = 0 if params.greedy else max(params.temperature, TINY)
        row["stream"] = slot.stream
        row["top_p"] = KEEP_ALL
        if slot.cuts_in_kernel:
            row["top_k"] = params.top_k if params.top_k < vocab_size else 0
            row["top_p"] = params.top_p if np.float32(params.top_p) < 1 else KEEP_ALL
            row["min_p"] = params.min_p
    return settings


class Sampler:
    """Settings and memories of the running requests, and the choice of their next tokens.

    A slot is a small integer that stands for a request from `add` to `remove`. Which tokens a
    request gets does not depend on the slots or on the other rows of its batches.

    Args:
        proposes: draw proposals for rejection sampling: with random numbers of their own, and keep
            the weights that they are drawn with.
    """

    def __init__(self, vocab_size: int, *, proposes: bool = False) -> None:
        self._vocab_size = vocab_size
        self._ready: dict[Variant, ReadyFor] = {}  # of kernels that were installed
        self._proposes = proposes
        self.reset()

    def kernels(self, model_dtype: mx.Dtype) -> list[KernelUse]:
        """For logits of each dtype, the kernels that sample and mask; there may be none.

        Only the kernel that samples without a mask from logits of `model_dtype` is checked at load.
        """
        uses = []
        for dtype in DTYPES.values() if self._vocab_size <= MAX_VOCAB else ():
            plain = sample_variant(dtype, masked=False)
            for variant in (plain, sample_variant(dtype, masked=True), bitmask_variant(dtype)):
                first = (ANY_ROWS,) if variant == plain and dtype == model_dtype else ()
                install = partial(self._ready.__setitem__, variant)
                uses.append(KernelUse({ANY_ROWS: [variant]}, install, first))
        return uses

    def reset(self) -> None:
        self._slots: dict[int, SamplerSlot] = {}
        self._memories: dict[int, list[Any]] = {}  # by slot, where there are any
        self._plans: dict[tuple[int, ...], SamplingPlan] = {}

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: frozenset[int],
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        """Keep the settings and the memories of a request, new or resumed.

        Args:
            output_ids: its answer so far; not empty where it resumes.
            stop_ids: the tokens that end it, forbidden before params.min_tokens.
            breakers: tokens that no repetition reaches over, for DRY.
        """
        if params.top_k >= self._vocab_size:
            params = params.changed({"top_k": 0})
        added = SamplerSlot(params, prompt_ids, output_ids, stop_ids, breakers)
        self._slots[slot] = added
        self._memories.pop(slot, None)  # of the request that had it before
        if added.memories:
            self._memories[slot] = list(added.memories.values())
        self._plans.clear()

    def observe(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Add tokens (N,), in order, to the memories of slots (N,); slot -1: none."""
        if not self._memories:
            return
        for slot, token_id in zip(slots, token_ids, strict=True):
            for memory in self._memories.get(slot, ()):
                memory.append(token_id)

    def sample(
        self,
        logits: mx.array,
        slots: Sequence[int],
        counts: NDArray[np.int64],
        recent: mx.array | None = None,
        mask: mx.array | None = None,
        proposed: Sequence[Drawn | None] = (),
    ) -> Sampled:
        """Choose a token for each row; nothing is evaluated.

        Args:
            logits: (R, V) any float dtype.
            slots: (R,) cheapest as the same tuple while the batch stays the same. A slot may have
                several rows, each with its own `counts` and `recent`.
            counts: (R,) index of each token that is chosen: how many its answer has before it.
            recent: (R, n) int32 the last tokens before it that were not observed, then -1;
                None: all were.
            mask: (R, ceil(V / 32)) uint32 tokens that a grammar allows (see apply_bitmask).
            proposed: (R,) proposals that are taken or redrawn by rejection sampling; empty: none.
        """
        plan, step = self._plan_for(slots), SamplerStep(counts, recent)
        rows = logits
        if plan.before:
            if mask is not None:
                rows, mask = self._masked(rows, mask), None
            rows = pad_rows(rows, plan.padding)
            for part in plan.before:
                rows = part.apply(rows, step)
        weights = None
        if not len(plan.drawn) and mask is None:
            tokens = mx.argmax(rows, axis=-1).astype(mx.int32)
        elif not (self._proposes or any(proposed)) and self.has_kernel(
            sample_variant(rows.dtype, masked=mask is not None)
        ):
            settings = plan.settings.copy()
            settings["count"] = counts
            tokens = sample(rows, settings_array(settings), mask)
        else:
            tokens, weights = self._choose(plan, rows, step, mask, proposed)
        logprobs = None
        if plan.logprobs:
            logprobs = LogprobArrays.of(logits, tokens, plan.logprobs)
        return Sampled(tokens, logprobs, weights if self._proposes else None, plan.drawn)

    def has_kernel(self, variant: Variant) -> bool:
        """Whether a kernel may be used, of those in `kernels`."""
        return self._ready.get(variant, never)(1)

    def _plan_for(self, slots: Sequence[int]) -> SamplingPlan:
        key = tuple(slots)  # the same object where it is a tuple already
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = make_plan([self._slots[slot] for slot in key], self._vocab_size)
            self._plans[key] = plan
        return plan

    def _masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask (R, ceil(V / 32)) forbids."""
        has_kernel = self.has_kernel(bitmask_variant(logits.dtype))
        return bitmask(logits, mask) if has_kernel else apply_bitmask(logits, mask)

    def _choose(
        self,
        plan: SamplingPlan,
        rows: mx.array,
        step: SamplerStep,
        mask: mx.array | None,
        proposed: Sequence[Drawn | None],
    ) -> tuple[mx.array, mx.array | None]:
        """(R,) int32 tokens in MLX's own operations, and the weights (D, width) of drawn rows."""
        if mask is not None:
            rows = self._masked(rows, mask)
        if not len(plan.drawn):
            return mx.argmax(rows, axis=-1).astype(mx.int32), None
        if rows.shape[-1] != padded_width(self._vocab_size):
            rows = pad_rows(rows, plan.padding)
        greedy = None if plan.device_drawn is None else mx.argmax(rows, axis=-1).astype(mx.int32)
        for part in plan.fused:
            rows = part.apply(rows, step)
        if plan.device_drawn is not None:
            rows = rows[plan.device_drawn]
        weights, counts = weights_of(rows, plan.temperature), step.counts[plan.drawn]
        streams = plan.streams ^ PROPOSING if self._proposes else plan.streams
        drawn = draw(weights, mx.array(uniforms(streams, counts)))
        if any(proposed):
            self._take_proposals(drawn, weights, plan, counts, proposed)
        tokens = drawn.astype(mx.int32)
        if greedy is not None:
            greedy[plan.device_drawn] = tokens
            tokens = greedy
        return tokens, weights

    def _take_proposals(
        self,
        drawn: mx.array,
        weights: mx.array,
        plan: SamplingPlan,
        counts: NDArray[np.int64],
        proposed: Sequence[Drawn | None],
    ) -> None:
        """Put what rejection sampling gives in place of the drawn (D,) tokens with a proposal."""
        pairs = [(i, proposed[row]) for i, row in enumerate(plan.drawn.tolist())]
        by_row = {i: token for i, token in pairs if token is not None}
        if by_row:
            rows, places = list(by_row), mx.array(list(by_row), mx.int32)
            drawn[places] = take_or_redraw(
                weights[places],
                list(by_row.values()),
                plan.streams[rows],
                counts[rows],
                self._vocab_size,
            )


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
