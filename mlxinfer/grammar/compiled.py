"""A compiled grammar, and the state of one answer under it. Knows matchers, no requests.

Matchers of one compiled grammar share the states of their lexer, which grow with use, to a limit.
So a grammar that was used much gets a new lexer, and an answer that runs into the limit starts over
with a lexer of its own, once: what others did is no reason to fail.
"""

import threading
from collections.abc import Sequence
from functools import cache

import llguidance
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequestError
from .check import LIMITS, readable
from .spec import GrammarSpec

WORD_BITS = 32  # of a mask
PARALLEL_FROM = 16  # rows; fewer are done sooner than several threads are told to
MAX_USES = 20_000  # tokens that the matchers of one lexer may take
SOURCE_FACTOR = 64  # bytes that a byte of source takes once it is compiled, about
BYTES_PER_USE = 256  # by which the lexer grows, about


class CompiledGrammar:
    """A grammar over the tokens of a model; safe to use from several threads.

    Args:
        table: of the tokens.
        spec: that was found sound.

    Raises:
        InvalidRequestError: it passes a limit with these tokens.
    """

    def __init__(self, table: "llguidance.LLTokenizer", spec: GrammarSpec) -> None:
        self.spec = spec
        self.num_uses = 0  # tokens since the lexer is new
        self._table = table
        self._source = spec.source
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._lock = threading.Lock()
        self._ends = [
            (i // WORD_BITS, np.uint32(~(1 << i % WORD_BITS) & 0xFFFFFFFF))
            for i in table.eos_tokens
        ]
        self.num_words = -(-table.vocab_size // WORD_BITS)  # of a mask
        self._prototype = self.matcher()
        if self._prototype.is_error():
            raise InvalidRequestError(
                f"{spec.place}: {readable(self._prototype.get_error())}", param=spec.place
            )

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return len(self._source) * SOURCE_FACTOR + self.num_uses * BYTES_PER_USE

    def start(self) -> "TokenGrammar":
        """The state of a new answer."""
        with self._lock:
            if self.num_uses > MAX_USES or self._prototype.is_error():
                self._prototype, self.num_uses = self.matcher(), 0
            return TokenGrammar(self, self._prototype.deep_copy())

    def matcher(self) -> "llguidance.LLMatcher":
        """At the beginning, with a lexer of its own and the first mask worked out."""
        made = llguidance.LLMatcher(self._table, self._source, log_level=0, limits=self._limits)
        if not made.is_error():
            made.compute_bitmask()
        return made

    def forbid_ends(self, mask: NDArray[np.uint32]) -> None:
        """Clear the bits of the tokens that llguidance takes for ends of an answer."""
        for word, keep in self._ends:
            mask[word] &= keep


class TokenGrammar:
    """The state of one answer; a `core.Grammar`."""

    def __init__(self, compiled: CompiledGrammar, matcher: "llguidance.LLMatcher") -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._taken: list[int] = []
        self._is_afresh = False

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is whole."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether it is whole and nothing may follow."""
    @property
    def place(self) -> str:
        """The field of the request that it came from."""
        return self._compiled.spec.place

        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def problem(self) -> str | None:
        """Why it cannot go on."""
        return readable(self._matcher.get_error()) if self._matcher.is_error() else None

    def accept(self, token_id: int) -> None:
        """Take in the next token of the answer."""
        self._taken.append(token_id)
        self._compiled.num_uses += 1
        if not self._matcher.consume_token(token_id):
            self._start_afresh()

    @staticmethod
    def fill_masks(
        grammars: Sequence["TokenGrammar"], rows: Sequence[int], masks: NDArray[np.uint32]
    ) -> None:
        """Write which tokens may come next; without Python's lock, and many in parallel."""
        words = grammars[0]._compiled.num_words  # the same for all of one model
        whole = masks
        if words != masks.shape[1]:  # the tokenizer has tokens that the model has not
            whole = np.zeros((len(masks), words), dtype=np.uint32)
        _compute([grammar._matcher for grammar in grammars], rows, whole)
        for grammar, row in zip(grammars, rows, strict=True):
            if grammar._matcher.is_error() and grammar._start_afresh():
                _compute([grammar._matcher], [row], whole)
            if grammar._matcher.is_accepting():
                grammar._compiled.forbid_ends(whole[row])
            if whole is not masks:
                masks[row] = whole[row, : masks.shape[1]]

    def _start_afresh(self) -> bool:
        """Come back to the same place with a lexer of its own; False: that does not help."""
        if self._is_afresh:
            return False
        self._is_afresh = True
        matcher = self._compiled.matcher()
        if not matcher.consume_tokens(self._taken):
            return False
        self._matcher = matcher
        return True


def _compute(
    matchers: Sequence["llguidance.LLMatcher"], rows: Sequence[int], masks: NDArray[np.uint32]
) -> None:
    """Write the masks of matchers; a matcher in trouble writes something."""
    assert masks.flags.c_contiguous
    assert max(rows) < len(masks)
    address: int = masks.__array_interface__["data"][0]  # `ctypes.data` takes longer than a mask
    row_bytes = masks.shape[1] * masks.itemsize
    if len(rows) >= PARALLEL_FROM:
        jobs = list(zip(matchers, rows, strict=True))
        _executor().unsafe_compute_mask_ptr(jobs, address, row_bytes, len(masks))
        return
    for matcher, row in zip(matchers, rows, strict=True):
        matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)


@cache
def _executor() -> "llguidance.LLExecutor":
    """The threads for masks, of the whole process."""
    return llguidance.LLExecutor()
