"""Chooses the next token of every row of a batch. Knows settings and slots, no requests or text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from ..metal_kernels.bitmask import bitmask
from ..metal_kernels.sample import sample, settings_array
from .adjustments import (
    Ints,
    SparseBias,
    TokenHistory,
    apply_bitmask,
    penalise,
    prompt_mask,
)
from .draw import DrawRanks, draw, pad_rows, uniforms
from .dry import DryHistory, apply_dry
from .logprobs import LogprobArrays, compute_logprobs
from .plan import ROW, Drawn, SamplingPlan, make_plan, row_of, sparse_bias
from .truncation import kept_weights
from .window import WindowHistory, penalise_window


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that one step chose; lazy until evaluated."""

    tokens: mx.array  # (R,) int32
    logprobs: LogprobArrays | None  # None: no row asks for them

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [self.tokens, *(self.logprobs.arrays() if self.logprobs is not None else [])]


class Choice(Protocol):
    """How the next token of every row is chosen, once penalties and biases are applied."""

    def masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask (R, ceil(V / 32)) forbids."""
        ...

    def choose(
        self, plan: SamplingPlan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """(R,) int32 a token of each row.

        Args:
            plan: of the batch.
            logits: (R, V), or padded rows (R, width).
            counts: (R,) index of each token that is chosen.
            mask: (R, ceil(V / 32)) uint32 tokens that are allowed, of rows that are not padded;
                None: all.
        """
        ...


class SamplingKernels(Protocol):
    """Which Metal kernels may be used now; asking for one that may not requests its check."""

    def samples(self, dtype: mx.Dtype, *, masked: bool) -> bool:
        """Whether one samples from logits of this dtype, with or without a grammar's mask."""
        ...

    def masks(self, dtype: mx.Dtype) -> bool:
        """Whether one applies masks to logits of this dtype."""
        ...


class PlainChoice:
    """The choice in MLX's own operations."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, ...], DrawRanks] = {}  # by shape: one for each number of rows

    def masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask forbids."""
        return apply_bitmask(logits, mask)

    def choose(
        self, plan: SamplingPlan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """Choose group by group, then put the tokens in the order of the rows."""
        if mask is not None:
            logits = self.masked(logits, mask)
        if plan.drawn is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        rows = logits if logits.shape[-1] == plan.width else pad_rows(logits, plan.padding)
        if plan.order is not None:
            rows = rows[plan.order]
        if plan.num_greedy:
            greedy, rows = mx.split(rows, [plan.num_greedy])
            tokens = [mx.argmax(greedy, axis=-1), self._drawn(plan, plan.drawn, rows, counts)]
            chosen = mx.concatenate(tokens)
        else:
            chosen = self._drawn(plan, plan.drawn, rows, counts)
        if plan.places is not None:
            chosen = mx.take_along_axis(chosen, plan.places, axis=0)
        return chosen.view(mx.int32)

    def _drawn(
        self, plan: SamplingPlan, drawn: Drawn, rows: mx.array, counts: NDArray[np.int64]
    ) -> mx.array:
        """(D,) uint32 tokens of padded rows (D, width); counts (R,) of the whole batch."""
        weights = kept_weights(rows, drawn.by_weight, drawn.by_rank)
        return self._draw(weights, drawn.streams, counts[drawn.places])

    def _draw(
        self, weights: mx.array, streams: NDArray[np.uint64], counts: NDArray[np.int64]
    ) -> mx.array:
        """(D,) uint32 one of each row of weights (D, width), by streams and counts (D,)."""
        random = uniforms(streams, counts)
        ranks = self._ranks.get(weights.shape)
        if ranks is None:
            ranks = self._ranks[weights.shape] = DrawRanks.of(*weights.shape)
        return draw(weights, mx.array(random[:, None, None]), ranks)


class KernelChoice(PlainChoice):
    """The choice in one dispatch for all rows, whatever their settings, masks included.

    Args:
        kernels: says which may be used; MLX's own operations do the rest.
    """

    def __init__(self, kernels: SamplingKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask forbids."""
        apply = bitmask if self._kernels.masks(logits.dtype) else apply_bitmask
        return apply(logits, mask)

    def choose(
        self, plan: SamplingPlan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """Through `metal_kernels.sample`; a batch that is all greedy is one operation anyway."""
        if mask is None and plan.drawn is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        if not self._kernels.samples(logits.dtype, masked=mask is not None):
            return super().choose(plan, logits, counts, mask)
        settings = plan.settings.copy()
        settings["count"] = counts
        return sample(logits, settings_array(settings), mask)


class Sampler:
    """Settings and histories of the running requests, and the choice of their next tokens.

    A slot is a small integer that stands for a request from `add` to `remove`. Which tokens a
    request gets does not depend on the slots or on the other rows of its batches.

    Args:
        vocab_size: of the model.
        kernels: says which Metal kernels may be used; None: none.
        choice: how tokens are chosen, in place of `KernelChoice` or `PlainChoice`.
        num_plans: batches that take turns, and of which each is the same for many steps.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        kernels: SamplingKernels | None = None,
        choice: Choice | None = None,
        num_plans: int = 2,
    ) -> None:
        self._num_plans = num_plans
        self._vocab_size = vocab_size
        if choice is None:
            choice = PlainChoice() if kernels is None else KernelChoice(kernels)
        self._choice: Choice = choice
        self._table = np.zeros(0, dtype=ROW)
        self._biases: dict[int, SparseBias] = {}
        self._prompts: dict[int, mx.array] = {}
        self._history = TokenHistory(spare=vocab_size)
        self._penalised: set[int] = set()  # slots that have a history
        self._dry: dict[int, DryHistory] = {}
        self._windows: dict[int, WindowHistory] = {}
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
        """Keep the settings and the history of a request, new or resumed.

        Args:
            slot: not in use.
            params: checked against the vocabulary.
            prompt_ids: its prompt.
            output_ids: its answer so far; not empty where it resumes.
            stop_ids: the tokens that end it, forbidden before params.min_tokens.
            breakers: tokens that no repetition reaches over, for DRY.
        """
        if slot >= len(self._table):
            self._table = np.pad(self._table, (0, max(slot + 1, 16)))
        self._table[slot] = row_of(params, self._vocab_size)
        bias = sparse_bias(params, stop_ids)
        if bias is not None:
            self._biases[slot] = bias
        if self._table["penalised"][slot]:
            self._penalised.add(slot)
            self._history.start(slot, output_ids, counted=params.frequency_penalty != 0)
        if params.repetition_penalty != 1 and params.repetition_window > 0:
            self._windows[slot] = WindowHistory(params, [*prompt_ids, *output_ids])
        elif params.repetition_penalty != 1 and params.repetition_window:
            self._prompts[slot] = prompt_mask(prompt_ids, self._vocab_size)
        if params.dry_multiplier and params.dry_penalty_last_n:
            self._dry[slot] = DryHistory(params, breakers, [*prompt_ids, *output_ids])
        self._plans.clear()

    def remove(self, slot: int) -> None:
        """Forget the request of this slot."""
        self._table[slot] = np.zeros((), dtype=ROW)
        self._biases.pop(slot, None)
        self._prompts.pop(slot, None)
        self._dry.pop(slot, None)
        self._windows.pop(slot, None)
        if slot in self._penalised:
            self._penalised.remove(slot)
            self._history.stop(slot)
        self._plans.clear()

    def observe(self, slots: Ints, token_ids: Ints) -> None:
        """Add tokens (N,) to the histories of slots (N,), all different; slot -1: none."""
        if self._penalised:
            self._history.observe(slots, token_ids)
        if self._dry or self._windows:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if slot in self._dry:
                    self._dry[slot].append(token_id)
                if slot in self._windows:
                    self._windows[slot].append(token_id)

    def sample(
        self,
        logits: mx.array,
        slots: Sequence[int],
        counts: NDArray[np.int64],
        recent: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> Sampled:
        """Choose a token for each row; nothing is evaluated.

        Args:
            logits: (R, V) any float dtype.
            slots: (R,) cheapest as the same tuple while the batch stays the same. A slot may have
                several rows, each with its own `counts` and `recent`.
            counts: (R,) index of each token that is chosen: how many its answer has before it.
            recent: (R, n) int32 the last tokens before it as far as they were not observed, and -1;
                None: all were.
            mask: (R, ceil(V / 32)) uint32 tokens that a grammar allows (see apply_bitmask).
        """
        plan = self._plan_for(slots)
        rows = logits
        if plan.adjusts:
            if mask is not None:
                rows, mask = self._choice.masked(rows, mask), None
            rows = self._adjusted(plan, pad_rows(rows, plan.padding), counts, recent)
        tokens = self._choice.choose(plan, rows, counts, mask)
        if plan.logprobs is None:
            return Sampled(tokens, None)
        return Sampled(tokens, compute_logprobs(logits, tokens, plan.logprobs))

    def _plan_for(self, slots: Sequence[int]) -> SamplingPlan:
        key = tuple(slots)  # the same object where it is a tuple already
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= self._num_plans:
                self._plans.clear()
            plan = make_plan(
                key,
                self._table,
                self._biases,
                self._prompts,
                self._vocab_size,
                self._dry,
                self._windows,
            )
            self._plans[key] = plan
        return plan

    def _adjusted(
        self,
        plan: SamplingPlan,
        rows: mx.array,
        counts: NDArray[np.int64],
        recent: mx.array | None,
    ) -> mx.array:
        """Padded rows after penalties, biases, DRY and the cuts that are no truncation."""
        if plan.windows is not None:
            rows = penalise_window(rows, plan.windows, self._windows, recent, self._vocab_size)
        if plan.penalties is not None:
            rows = penalise(rows, plan.penalties, self._history, recent)
        if plan.biases is not None:
            rows = plan.biases.apply(rows, counts)
        if plan.dry is not None:
            rows = apply_dry(rows, plan.dry, self._dry, recent, self._vocab_size)
        return rows if plan.cuts is None else plan.cuts.apply(rows, counts)
