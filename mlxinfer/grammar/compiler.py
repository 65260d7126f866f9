"""From a grammar's description to a compiled one: checked, built, kept. Knows no requests.

A grammar that a stranger sent is first tried in a process that can be killed (`checker.py`), then
built here under llguidance's own limits. Building holds no lock of Python, and runs on the caller's
thread, never on the engine's.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .checker import Checker
from .spec import GrammarSpec

if TYPE_CHECKING:
    import llguidance

    from .compiled import CompiledGrammar, TokenGrammar
    from .tokens import Tokens


class GrammarCompiler:
    """Compiles grammars for the tokens of one model, and keeps those that were used last.

    Safe to use from several threads. The table of tokens and the checking process are made when
    the first grammar comes.

    Args:
        tokens: the model's tokenizer.
        vocab_size: of the model, which may be larger than the tokenizer's.
        end_ids: tokens that end an answer.
        cache_bytes: what compiled grammars may take together, about.
        checker: tries grammars out; None: one with the usual limits.
    """

    def __init__(
        self,
        tokens: "Tokens",
        *,
        vocab_size: int,
        end_ids: Iterable[int],
        cache_bytes: int = 64 << 20,
        checker: Checker | None = None,
    ) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._special = {i: tokens.token_bytes(i).decode() for i in sorted(tokens.added_tokens)}
        self._cache_bytes = cache_bytes
        self._checker = checker or Checker()
        self._table: llguidance.LLTokenizer | None = None
        self._table_lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()

    def start(self, spec: GrammarSpec) -> "TokenGrammar":
        """The state of a new answer under a grammar, for one request.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or not within the limits.
            UnsupportedModelError: the model's tokenizer has no end token.
            OverloadedError: too many grammars at once.
        """
        return self.compile(spec).start()

    def compile(self, spec: GrammarSpec) -> "CompiledGrammar":
        """The compiled grammar, from the cache if it is there.

        Raises:
            As start.
        """
        with self._cache_lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
                return found
        if spec.names_tokens:
            self._checker.check(spec, self._special, self._vocab_size)
        else:
            self._checker.check(spec)
        from .compiled import CompiledGrammar  # imports llguidance: the first grammar pays for it

        compiled = CompiledGrammar(self.table(), spec)
        with self._cache_lock:
            self._cache[spec] = compiled
            self._trim()
        return compiled

    def table(self) -> "llguidance.LLTokenizer":
        """The table of tokens; made once, in seconds for a large vocabulary."""
        from .tokens import token_table

        with self._table_lock:
            if self._table is None:
                self._table = token_table(
                    self._tokens, vocab_size=self._vocab_size, end_ids=self._end_ids
                )
            return self._table

    def close(self) -> None:
        """End the checking process; another starts if it is needed."""
        self._checker.close()

    def _trim(self) -> None:
        """Let go of what was not used the longest, until the rest fits; the newest stays."""
        total = sum(compiled.num_bytes for compiled in self._cache.values())
        while total > self._cache_bytes and len(self._cache) > 1:
            _, gone = self._cache.popitem(last=False)
            total -= gone.num_bytes
