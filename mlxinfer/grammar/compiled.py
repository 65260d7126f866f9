"""A compiled grammar, and the state of one answer under it.

Matchers of one compiled grammar share a lexer. Its states grow with use, up to a limit. So a
grammar that was used much gets a new lexer, and an answer that reaches the limit starts over once
with a lexer of its own: other answers' use is no reason for it to fail.

Masks are filled on the engine's thread, where all other answers wait. Their cost cannot be read off
a grammar, so the CPU time of each answer's masks is measured and limited.
"""

import threading
import time
from collections.abc import Sequence
from copy import copy
from functools import cache

import llguidance
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequestError
from .check_process import parser_limits, readable
from .relaxed import Unenforced
from .spec import GrammarSpec

ALLOWED_S = 0.01  # per mask or token; a thousand optional properties take a quarter of it
MAX_EXCESS_S = 0.1  # of one answer, for a grammar that may be ambiguous
MAX_EXCESS_FIXED_S = 1.0  # for others, which are slow until the shared lexer has grown
TIMED_ALONE_FROM_S = 0.05  # wall time of masks filled in parallel: the time of each is unknown


WORD_BITS = 32  # of a mask
PARALLEL_FROM = 16  # rows; for fewer, starting threads takes longer than the masks
MAX_USES = 20_000  # tokens that the matchers of one lexer may take
SOURCE_FACTOR = 64  # bytes that a byte of source takes once it is compiled, about
FIXED_BYTES = 128 << 10  # of a grammar that was not used, about; resident memory of many says so
MAX_STATES = 128  # of a lexer, about, that its first uses make
BYTES_PER_STATE = 1024  # beside half a mask
BYTES_PER_USE = 256  # by which the lexer grows, about
MAX_RESTART_S = 0.1  # of CPU, to make a lexer on the engine's thread
LEXER_ERROR = "lexer error"  # in llguidance's messages


class MaskTimeLimit:
    """The CPU time that one answer's masks have taken beyond ALLOWED_S each.

    Time below ALLOWED_S reduces the excess again. CPU time of the thread is counted, since it does
    not pass faster on a busy machine.

    Attributes:
        excess_s: seconds, at least 0.
        is_timed_alone: the next mask has to be filled by itself, so that its time is known.
    """

    def __init__(self, max_excess_s: float = MAX_EXCESS_S) -> None:
        self._max_excess_s = max_excess_s
        self.excess_s = 0.0
        self.is_timed_alone = False

    def add(self, seconds: float) -> None:
        """Count the time of a mask, or of a token that the grammar followed."""
        if not self.is_exceeded:
            self.excess_s = max(0.0, self.excess_s + seconds - ALLOWED_S)
        self.is_timed_alone = self.excess_s > 0.0

    @property
    def is_exceeded(self) -> bool:
        """Whether the excess was too large; it stays so."""
        return self.excess_s > self._max_excess_s

    @property
    def problem(self) -> str | None:
        """Why the answer cannot go on, and what to do; None if it can."""
        if not self.is_exceeded:
            return None
        return (
            "working out which tokens may come takes more than "
            f"{1e3 * ALLOWED_S:.0f} ms of CPU time a token; make it "
            "simpler: fewer properties, or fewer ways to derive the same text"
        )


class CompiledGrammar:
    """A grammar over the tokens of a model. Safe to use from several threads.

    Raises:
        InvalidRequestError: it exceeds a limit with these tokens.
    """

    def __init__(self, table: "llguidance.LLTokenizer", spec: GrammarSpec) -> None:
        self.spec = spec
        self.num_uses = 0  # tokens since the lexer is new
        self._table = table
        self._source = spec.source
        self._limits = parser_limits(is_free=spec.is_free)
        self._lock = threading.Lock()
        self._ends = [
            (i // WORD_BITS, np.uint32(~(1 << i % WORD_BITS) & 0xFFFFFFFF))
            for i in table.eos_tokens
        ]
        self.num_words = -(-table.vocab_size // WORD_BITS)  # of a mask
        began_s = time.thread_time()
        self._prototype = self.matcher()
        self.matcher_s = time.thread_time() - began_s  # CPU that one takes
        if self._prototype.is_error():
            raise InvalidRequestError(
                f"{spec.place}: {readable(self._prototype.get_error())}", param=spec.place
            )

    @property
    def num_bytes(self) -> int:
        """How many bytes of memory the grammar takes, about."""
        new_states = min(self.num_uses, MAX_STATES) * (BYTES_PER_STATE + 2 * self.num_words)
        used = self.num_uses * BYTES_PER_USE + new_states
        return FIXED_BYTES + len(self._source) * SOURCE_FACTOR + used

    def start(self) -> "TokenGrammar":
        with self._lock:
            if self.num_uses > MAX_USES or self._prototype.is_error():
                self._prototype, self.num_uses = self.matcher(), 0
            return TokenGrammar(self, self._prototype.deep_copy())

    def matcher(self) -> "llguidance.LLMatcher":
        made = llguidance.LLMatcher(self._table, self._source, log_level=0, limits=self._limits)
        if not made.is_error():
            made.compute_bitmask()
        return made

    def forbid_ends(self, mask: NDArray[np.uint32]) -> None:
        for word, keep in self._ends:
            mask[word] &= keep


class TokenGrammar:
    """The state of one answer; a `core.Grammar`."""

    def __init__(self, compiled: CompiledGrammar, matcher: "llguidance.LLMatcher") -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._taken: list[int] = []
        self._mask_time = MaskTimeLimit(
            MAX_EXCESS_S if compiled.spec.is_free else MAX_EXCESS_FIXED_S
        )
        self._is_afresh = False

    @property
    def place(self) -> str:
        return self._compiled.spec.place

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        return self._compiled.spec.unenforced

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def problem(self) -> str | None:
        """Why the answer cannot go on; None if it can."""
        if self._matcher.is_error():
            return readable(self._matcher.get_error())
        return self._mask_time.problem

    def accept(self, token_id: int) -> None:
        self._taken.append(token_id)
        self._compiled.num_uses += 1
        began_s = time.thread_time()
        taken = self._matcher.consume_token(token_id)
        self._mask_time.add(time.thread_time() - began_s)
        if not taken:
            self._start_afresh()

    def forced(self) -> list[int]:
        """Return tokens of the text that must come next; the model may spell it with others."""
        if self.finished or self.problem is not None or self.accepting:
            return []
        began_s = time.thread_time()
        token_ids: list[int] = self._matcher.compute_ff_tokens()
        self._mask_time.add(time.thread_time() - began_s)
        return token_ids

    def fork(self) -> "TokenGrammar":
        """Return a copy of the state to look ahead with; its time does not count here."""
        other = TokenGrammar(self._compiled, self._matcher.deep_copy())
        other._taken = list(self._taken)
        other._mask_time = copy(self._mask_time)
        other._is_afresh = self._is_afresh
        return other

    @staticmethod
    def fill_masks(
        grammars: Sequence["TokenGrammar"], rows: Sequence[int], masks: NDArray[np.uint32]
    ) -> None:
        """Write the allowed next tokens of several answers into their rows of `masks`.

        Releases the GIL; many masks are filled in parallel. The row of a grammar with a problem is
        arbitrary.

        Args:
            rows: of `masks`, one for each grammar.
            masks: (rows, words), one bit per token.
        """
        words = grammars[0]._compiled.num_words  # the same for all of one model
        whole = masks
        if words != masks.shape[1]:  # the tokenizer has tokens that the model has not
            whole = np.zeros((len(masks), words), dtype=np.uint32)
        pairs = list(zip(grammars, rows, strict=True))
        _compute([pair for pair in pairs if not pair[0]._mask_time.is_exceeded], whole)
        for grammar, row in pairs:
            if grammar._matcher.is_error() and grammar._start_afresh():
                _compute([(grammar, row)], whole)
            if grammar._matcher.is_accepting():
                grammar._compiled.forbid_ends(whole[row])
            if whole is not masks:
                masks[row] = whole[row, : masks.shape[1]]

    def _start_afresh(self) -> bool:
        """Return to the same place with a new lexer; False if that does not help."""
        helps = LEXER_ERROR in self._matcher.get_error()
        if self._is_afresh or not helps or self._compiled.matcher_s > MAX_RESTART_S:
            return False
        self._is_afresh = True
        matcher = self._compiled.matcher()
        if not matcher.consume_tokens(self._taken):
            return False
        self._matcher = matcher
        return True


def _compute(pairs: Sequence[tuple[TokenGrammar, int]], masks: NDArray[np.uint32]) -> None:
    """Fill the masks of grammars; the row of a grammar with a problem is arbitrary."""
    if not pairs:
        return
    assert masks.flags.c_contiguous
    assert max(row for _, row in pairs) < len(masks)
    if len(pairs) >= PARALLEL_FROM and not any(
        grammar._mask_time.is_timed_alone for grammar, _ in pairs
    ):
        _compute_together(pairs, masks)
        return
    address, row_bytes = _place(masks)
    for grammar, row in pairs:
        began_s = time.thread_time()
        grammar._matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        grammar._mask_time.add(time.thread_time() - began_s)


def _compute_together(pairs: Sequence[tuple[TokenGrammar, int]], masks: NDArray[np.uint32]) -> None:
    """Fill masks in several threads.

    If that takes long, the next masks are timed alone, to find the grammar that is slow.
    """
    address, row_bytes = _place(masks)
    jobs = [(grammar._matcher, row) for grammar, row in pairs]
    began_s = time.monotonic()
    _executor().unsafe_compute_mask_ptr(jobs, address, row_bytes, len(masks))
    if time.monotonic() - began_s > TIMED_ALONE_FROM_S:
        for grammar, _ in pairs:
            grammar._mask_time.is_timed_alone = True


def _place(masks: NDArray[np.uint32]) -> tuple[int, int]:
    """Return the address of the masks, and the bytes of a row."""
    address: int = masks.__array_interface__["data"][0]  # `ctypes.data` takes longer than a mask
    return address, masks.shape[1] * masks.itemsize


@cache
def _executor() -> "llguidance.LLExecutor":
    return llguidance.LLExecutor()
