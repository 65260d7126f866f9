"""Chooses the next token of every row of a batch. Knows settings and slots, no requests or text."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from .biases import SparseBias, sparse_bias
from .blocks import pad_rows
from .choice import Choice, KernelChoice, PlainChoice
from .history import Ints, TokenHistory
from .logprobs import LogprobArrays, compute_logprobs
from .penalties import penalise, prompt_mask
from .plan import Plan, make_plan
from .settings import ROW, row_of

MAX_PLANS = 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step chose; lazy until evaluated."""

    tokens: mx.array  # (R,) int32
    logprobs: LogprobArrays | None  # None: no row asked

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [self.tokens, *(self.logprobs.arrays() if self.logprobs is not None else [])]


class Sampler:
    """Settings and histories of the running requests, and the choice of their next tokens.

    A slot is a small integer that stands for a request from `add` to `remove`. Which tokens a
    request gets does not depend on the slots or on the other rows of its batches.
    """

    def __init__(self, vocab_size: int, *, kernel: bool = False, mask_kernel: bool = False) -> None:
        self._vocab_size = vocab_size
        self._choice: Choice = (KernelChoice if kernel else PlainChoice)(mask_kernel=mask_kernel)
        self._table = np.zeros(0, dtype=ROW)
        self._biases: dict[int, SparseBias] = {}
        self._prompts: dict[int, mx.array] = {}
        self._history = TokenHistory(spare=vocab_size)
        self._plans: dict[tuple[int, ...], Plan] = {}  # two batches may take turns

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: frozenset[int],
    ) -> None:
        """Take up a request, new or resumed.

        Args:
            slot: not in use.
            params: checked against the vocabulary.
            prompt_ids: its prompt.
            output_ids: what it has said so far; not empty where it resumes.
            stop_ids: the tokens that end it, forbidden before params.min_tokens.
        """
        if slot >= len(self._table):
            self._table = np.pad(self._table, (0, max(slot + 1, 16)))
        self._table[slot] = row_of(params, self._vocab_size)
        bias = sparse_bias(params, stop_ids)
        if bias is not None:
            self._biases[slot] = bias
        if params.penalised:
            self._history.start(slot, output_ids, counted=params.frequency_penalty != 0)
        if params.repetition_penalty != 1:
            self._prompts[slot] = prompt_mask(prompt_ids, self._vocab_size)
        self._plans.clear()

    def remove(self, slot: int) -> None:
        """Forget the request of this slot."""
        self._table[slot] = np.zeros((), dtype=ROW)
        self._biases.pop(slot, None)
        self._prompts.pop(slot, None)
        self._history.stop(slot)
        self._plans.clear()

    def observe(self, slots: Ints, token_ids: Ints) -> None:
        """Take note of tokens (N,) read back, one for each slot (N,); -1: in use no longer."""
        self._history.observe(slots, token_ids)

    def sample(
        self,
        logits: mx.array,
        slots: Sequence[int],
        counts: NDArray[np.int64],
        pending: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> Sampled:
        """Choose a token for each row; nothing is evaluated.

        Args:
            logits: (R, V) any float dtype.
            slots: (R,) distinct; cheapest as the same tuple while the batch stays the same.
            counts: (R,) index of each token that is chosen: how many its answer has before it.
            pending: (R,) int32 the token before this one where it was not observed yet, else -1.
            mask: (R, ceil(V / 32)) uint32 tokens that a grammar allows (see apply_bitmask).
        """
        plan = self._plan_for(slots)
        rows = logits
        if plan.adjusts:
            if mask is not None:
                rows, mask = self._choice.masked(rows, mask), None
            rows = self._adjusted(plan, pad_rows(rows, plan.padding), counts, pending)
        tokens = self._choice.choose(plan, rows, counts, mask)
        if plan.logprobs is None:
            return Sampled(tokens, None)
        return Sampled(tokens, compute_logprobs(logits, tokens, plan.logprobs))

    def _plan_for(self, slots: Sequence[int]) -> Plan:
        key = tuple(slots)  # the same object where it is a tuple already
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = make_plan(key, self._table, self._biases, self._prompts, self._vocab_size)
            self._plans[key] = plan
        return plan

    def _adjusted(
        self, plan: Plan, rows: mx.array, counts: NDArray[np.int64], pending: mx.array | None
    ) -> mx.array:
        """Padded rows after penalties and biases."""
        if plan.penalties is not None:
            rows = penalise(rows, plan.penalties, self._history, pending)
        if plan.biases is not None:
            rows = plan.biases.apply(rows, counts)
        return rows
