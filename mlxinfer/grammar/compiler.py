"""Grammar specs to compiled grammars: checked, built, cached.

An untrusted grammar is first compiled in a process that can be killed (`check_process.py`), then
built here under llguidance's own limits. Building releases the GIL and runs on the caller's thread,
never on the engine's.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError, MlxinferError, OverloadedError
from ..killable import EndedError, KillableProcess, Packet
from .schema import at
from .spec import GrammarSpec

if TYPE_CHECKING:
    import llguidance

    from .compiled import CompiledGrammar, TokenGrammar
    from .tokens import Tokens


NOTHING = {
    "source": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',
    "schemas": [],
    "is_free": False,
    "special": {},
    "vocab_size": 0,
}
PROGRAM = "mlxinfer.grammar.check_process"


class CheckProcess(KillableProcess):
    """The process in which grammars are tried out."""

    def __init__(self, *, max_seconds: float = 5.0, max_bytes: int = 1 << 30) -> None:
        super().__init__(PROGRAM, NOTHING, max_seconds=max_seconds, max_bytes=max_bytes)

    def check(
        self,
        spec: GrammarSpec,
        special: Mapping[int, str] | None = None,
        vocab_size: int = 0,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return if a grammar can be compiled.

        Args:
            special: {id: text} of the control tokens that it may name.
            vocab_size: upper end of the ids that it may name.

        Raises:
            CancelledError: the caller has left.
            InvalidRequestError: it cannot; with the place in the request.
            OverloadedError: too many grammars wait, or the process was killed.
        """
        job = {
            "source": spec.source,
            "schemas": [[p.place, p.text] for p in spec.schemas],
            "is_free": spec.is_free,
            "special": special or {},
            "vocab_size": vocab_size,
        }
        try:
            reply = self.ask(Packet(job), abandoned).value
        except EndedError as ended:
            raise self._error_of(ended, spec) from None
        if reply:
            raise at(reply["place"] or spec.place, "", reply["error"])

    def _error_of(self, ended: EndedError, spec: GrammarSpec) -> MlxinferError:
        if not ended.is_to_blame:
            return OverloadedError(
                "The process that tries grammars out was ended from outside; try again."
            )
        return InvalidRequestError(
            f"{spec.place} takes more than {self.max_seconds:g} s or "
            f"{self.max_bytes / 1e6:.0f} MB to compile; make it simpler.",
            param=spec.place,
        )


class GrammarCompiler:
    """Compiles grammars for the tokens of one model, and caches the ones used last.

    Safe to use from several threads. The token table and the checking process are made for the
    first grammar.

    Args:
        vocab_size: of the model, which may be larger than the tokenizer's.
        cache_bytes: memory of the cached grammars together, about.
        checker: tries grammars out; None: one with the usual limits.
    """

    def __init__(
        self,
        tokens: "Tokens",
        *,
        vocab_size: int,
        end_ids: Iterable[int],
        cache_bytes: int = 64 << 20,
        checker: CheckProcess | None = None,
    ) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._special = {i: tokens.token_bytes(i).decode() for i in sorted(tokens.added_tokens)}
        self._cache_bytes = cache_bytes
        self._checker = checker or CheckProcess()
        self._table: llguidance.LLTokenizer | None = None
        self._table_lock = threading.Lock()
        # Oldest use first. A dict: an OrderedDict is broken for good where Ctrl-C interrupts a
        # key's hash in it.
        self._cache: dict[GrammarSpec, CompiledGrammar] = {}
        self._cache_lock = threading.Lock()

    def start(
        self, spec: GrammarSpec, abandoned: Callable[[], bool] = lambda: False
    ) -> "TokenGrammar":
        """Return the state of a new answer under a grammar.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or not within the limits.
            UnsupportedModelError: the model's tokenizer has no end token.
            OverloadedError: too many grammars at once.
            CancelledError: the caller has left.
        """
        return self.compile(spec, abandoned).start()

    def compile(
        self, spec: GrammarSpec, abandoned: Callable[[], bool] = lambda: False
    ) -> "CompiledGrammar":
        """Return the compiled grammar, from the cache if it is there.

        Args and errors: those of start.
        """
        with self._cache_lock:
            grammar = self._cache.pop(spec, None)
            if grammar is not None:
                self._cache[spec] = grammar
                return grammar
        if spec.names_tokens:
            self._checker.check(spec, self._special, self._vocab_size, abandoned)
        else:
            self._checker.check(spec, abandoned=abandoned)
        from .compiled import CompiledGrammar  # imports llguidance: the first grammar pays for it

        compiled = CompiledGrammar(self.table(), spec)
        with self._cache_lock:
            self._cache[spec] = compiled
            self._trim()
        return compiled

    def table(self) -> "llguidance.LLTokenizer":
        """Return the token table; made once, in seconds for a large vocabulary."""
        from .tokens import token_table

        with self._table_lock:
            if self._table is None:
                self._table = token_table(
                    self._tokens, vocab_size=self._vocab_size, end_ids=self._end_ids
                )
            return self._table

    def close(self) -> None:
        self._checker.close()

    def _trim(self) -> None:
        """Drop the least recently used grammars until the rest fits; the newest stays."""
        total = sum(compiled.num_bytes for compiled in self._cache.values())
        while total > self._cache_bytes and len(self._cache) > 1:
            total -= self._cache.pop(next(iter(self._cache))).num_bytes
