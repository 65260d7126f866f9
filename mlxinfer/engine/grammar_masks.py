"""Which tokens the grammars of a step allow. Knows masks and end tokens, no arrays of MLX."""

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from ..core import Grammar, Request
from ..errors import GrammarFailedError
from .batch import SamplingRows, Sequence

Masks = NDArray[np.uint32]
WORD_BITS = 32
ALL = np.uint32(0xFFFFFFFF)


def fill_masks(
    sampling: SamplingRows, vocab_size: int
) -> tuple[Masks, list[tuple[Sequence, GrammarFailedError]]]:
    """The masks of the G constrained rows of a step, from the tokens that are known.

    An answer may end where its grammar is satisfied, nowhere else: there its end tokens are allowed
    beside what the grammar allows. A row that comes after proposals has the mask of the state after
    them; where that state allows nothing the row is blocked, and its sequence gets there again
    without proposals.

    Returns:
        masks (G, ceil(V / 32)), and the sequences that cannot go on, with the error. A row that
        cannot go on, or belongs to an ended request, allows everything: its token is discarded.
    """
    first = sampling.num_free
    sequences, proposals = sampling.sequences[first:], sampling.proposals
    masks = np.full((len(sequences), -(-vocab_size // WORD_BITS)), ALL)
    counts = [0] * len(sequences) if proposals is None else proposals.counts[first:].tolist()
    states: dict[int, Grammar] = {}
    for row, sequence in enumerate(sequences):
        if sequence.finished:
            continue
        if proposals is not None and counts[row]:  # the row before is one proposal behind
            states[row] = states[row - 1].fork()
            states[row].accept(int(proposals.token_ids[first + row, counts[row] - 1]))
        else:
            states[row] = _grammar(sequence)
    _fill_by_kind(states, masks)
    stuck = []
    for row, state in states.items():
        sequence = sequences[row]
        num_answered = sequence.num_answered + counts[row]
        problem = _allow_ends(sequence.request, state, masks[row], num_answered)
        if problem is None:
            continue
        masks[row] = ALL
        if proposals is not None and counts[row]:
            proposals.blocked.add(first + row)
        else:
            stuck.append((sequence, _stuck_error(sequence, problem)))
    return masks, stuck


def num_allowed(request: Request, token_ids: Seq[int]) -> int:
    """How many of these tokens the answer may go on with; it does not end within them."""
    assert request.grammar is not None
    try:
        state = request.grammar.fork()
        for count, token_id in enumerate(token_ids):
            if token_id in request.stop_ids:
                return count
            state.accept(token_id)
            if state.problem is not None or state.finished:
                return count
    except BaseException:  # the fault boundary of a grammar: reported where it is met for good
        return 0
    return len(token_ids)


def _grammar(sequence: Sequence) -> Grammar:
    grammar = sequence.request.grammar
    assert grammar is not None
    return grammar


def _stuck_error(sequence: Sequence, problem: str) -> GrammarFailedError:
    return GrammarFailedError(
        f"The grammar of this request cannot go on after {sequence.num_answered} tokens: {problem}",
        param=_grammar(sequence).place,
    )


def _fill_by_kind(states: dict[int, Grammar], masks: Masks) -> None:
    """One call for all grammars of a class, which may use several cores."""
    kinds: dict[type[Grammar], dict[int, Grammar]] = {}
    for row, state in states.items():
        kinds.setdefault(type(state), {})[row] = state
    for kind, rows in kinds.items():
        kind.fill_masks(list(rows.values()), list(rows), masks)


def _allow_ends(request: Request, state: Grammar, mask: Masks, num_answered: int) -> str | None:
    """Allow the end tokens where the answer may end; returns why no token is left, if none is.

    Args:
        state: of its grammar after `num_answered` tokens.
        mask: (ceil(V / 32),) what the grammar allows.
    """
    early = num_answered < request.params.min_tokens
    if state.problem is not None:
        return state.problem
    if state.accepting and not early:
        _allow(mask, request.stop_ids)
    if not mask.any():
        return "no token of this vocabulary continues what the grammar wants"
    if early and not _any_but(mask, request.stop_ids):  # the sampler forbids end tokens
        return f"nothing but end tokens may come now, and min_tokens is {request.params.min_tokens}"
    return None


def _allow(mask: Masks, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        mask[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def _any_but(mask: Masks, token_ids: frozenset[int]) -> bool:
    remaining = mask.copy()
    for token_id in token_ids:
        remaining[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
    return bool(remaining.any())
