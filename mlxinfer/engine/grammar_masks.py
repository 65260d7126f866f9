"""Which tokens the grammars of a step allow. Knows masks and end tokens, no arrays of MLX."""

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from ..core import Grammar, Request
from ..sampling.bitmask import WORD_BITS, num_words
from .sequence import Sequence

Masks = NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)


class GrammarMasks:
    """Fills the masks of rows under a grammar, from the tokens that are known.

    An answer may end where its grammar is satisfied, nowhere else: there its end tokens are allowed
    beside what the grammar allows.
    """

    def __init__(self, vocab_size: int) -> None:
        self._masks = np.zeros((0, num_words(vocab_size)), dtype=np.uint32)

    def fill(self, sequences: Seq[Sequence]) -> tuple[Masks, list[tuple[Sequence, str]]]:
        """The masks of these rows, (G, ceil(V / 32)), and which of them cannot go on, and why.

        The masks are written over by the next call. A row that cannot go on, or whose request has
        ended, allows everything: its token is thrown away.
        """
        masks = self._room(len(sequences))
        alive = [row for row, sequence in enumerate(sequences) if not sequence.finished]
        _fill_by_kind([(_grammar(sequences[row]), row) for row in alive], masks)
        stuck = []
        for row in alive:
            reason = self._end_tokens(sequences[row], masks[row])
            if reason is not None:
                stuck.append((sequences[row], reason))
                masks[row] = ALL
        if len(alive) < len(sequences):
            for row, sequence in enumerate(sequences):
                if sequence.finished:
                    masks[row] = ALL
        return masks, stuck

    def _room(self, num_rows: int) -> Masks:
        if num_rows > len(self._masks):
            self._masks = np.zeros((2 * num_rows, self._masks.shape[1]), dtype=np.uint32)
        return self._masks[:num_rows]

    def _end_tokens(self, sequence: Sequence, mask: Masks) -> str | None:
        """Allow the end tokens where the answer may end; why there is nothing to choose from."""
        request = sequence.request
        grammar = _grammar(sequence)
        early = sequence.num_answered < request.params.min_tokens
        if grammar.problem is not None:
            return grammar.problem
        if grammar.accepting and not early:
            _allow(mask, request.stop_ids)
        if not mask.any():
            return "no token of this vocabulary continues what the grammar wants"
        if early and not _any_but(mask, request.stop_ids):  # the sampler forbids end tokens
            return (
                f"nothing but end tokens may come now, and min_tokens is "
                f"{request.params.min_tokens}"
            )
        return None


def follow(request: Request, token_id: int) -> bool:
    """Show a request's grammar the token that was chosen; whether the answer is now at its end.

    An end token ends the answer by itself, and is none of the grammar's.
    """
    assert request.grammar is not None
    if token_id in request.stop_ids:
        return False
    request.grammar.accept(token_id)
    return request.grammar.finished


def _grammar(sequence: Sequence) -> Grammar:
    grammar = sequence.request.grammar
    assert grammar is not None
    return grammar


def _fill_by_kind(grammars: Seq[tuple[Grammar, int]], masks: Masks) -> None:
    """One call for all grammars of a class, which may use several cores."""
    kinds: dict[type[Grammar], list[tuple[Grammar, int]]] = {}
    for grammar, row in grammars:
        kinds.setdefault(type(grammar), []).append((grammar, row))
    for kind, some in kinds.items():
        kind.fill_masks([grammar for grammar, _ in some], [row for _, row in some], masks)


def _allow(mask: Masks, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        mask[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def _any_but(mask: Masks, token_ids: frozenset[int]) -> bool:
    """Whether any token is allowed beside these."""
    rest = mask.copy()
    for token_id in token_ids:
        rest[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
    return bool(rest.any())
