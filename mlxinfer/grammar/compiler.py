"""Grammar specs to compiled grammars: checked, built, cached.

An untrusted grammar is first compiled in a process that can be killed (`check_process.py`), then
built here under llguidance's own limits. Building releases the GIL and runs on the caller's thread,
never on the engine's.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, MlxinferError, OverloadedError
from ..threads import run_apart
from .schema import at
from .spec import GrammarSpec

if TYPE_CHECKING:
    import llguidance

    from .compiled import CompiledGrammar, TokenGrammar
    from .tokens import Tokens


START_SECONDS = 30.0
END_SECONDS = 5.0  # for a process after its streams are closed
NOTHING = {
    "source": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',
    "schemas": [],
    "is_free": False,
}
PROGRAM = Path(__file__).with_name("check_process.py")
# A process that these ended did nothing wrong; a grammar that takes too much ends it otherwise.
FROM_OUTSIDE = frozenset(
    -number
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
)


class _EndedError(Exception):
    """The process ended during a job; `is_to_blame` says whether the job caused it."""

    def __init__(self, *, is_to_blame: bool) -> None:
        super().__init__()
        self.is_to_blame = is_to_blame  # the job


class CheckProcess:
    """The process in which grammars are tried; a killed one is replaced at the next grammar.

    Safe to use from several threads, which wait for each other. A check runs on a thread of its own
    to its end: a caller that Ctrl-C interrupts leaves no verdict unread and no lock taken.

    Args:
        max_seconds: limit of one grammar, and of the wait for other threads' grammars.
        max_bytes: memory that the process may take.
    """

    def __init__(self, *, max_seconds: float = 5.0, max_bytes: int = 1 << 30) -> None:
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self.num_started = 0
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def check(
        self, spec: GrammarSpec, special: Mapping[int, str] | None = None, vocab_size: int = 0
    ) -> None:
        """Return if a grammar can be compiled.

        Args:
            spec: the grammar.
            special: {id: text} of the control tokens that it may name.
            vocab_size: upper end of the ids that it may name.

        Raises:
            InvalidRequestError: it cannot; with the place in the request and a JSON pointer.
            OverloadedError: other grammars took all the time, or the process was killed.
        """
        run_apart(partial(self._check, spec, special or {}, vocab_size), "mlxinfer-grammar")

    def close(self) -> None:
        """End the process; the next check starts another."""
        run_apart(self._close, "mlxinfer-grammar")

    def _check(self, spec: GrammarSpec, special: Mapping[int, str], vocab_size: int) -> None:
        job = {
            "source": spec.source,
            "schemas": [[p.place, p.text] for p in spec.schemas],
            "is_free": spec.is_free,
            "special": special,
            "vocab_size": vocab_size,
        }
        if not self._turn.acquire(timeout=self.max_seconds):
            raise OverloadedError("Other grammars are being compiled; try again.")
        try:
            reply = self._ask_twice(job)
        except _EndedError as ended:
            raise self._error_of(ended, spec) from None
        finally:
            self._turn.release()
        if reply:
            raise at(reply["place"] or spec.place, reply["pointer"], reply["error"])

    def _close(self) -> None:
        with self._turn:
            self._stop()

    def _error_of(self, ended: _EndedError, spec: GrammarSpec) -> MlxinferError:
        if not ended.is_to_blame:
            return OverloadedError(
                "The process that tries grammars out was ended from outside; try again."
            )
        return InvalidRequestError(
            f"{spec.place} takes more than {self.max_seconds:g} s or "
            f"{self.max_bytes / 1e6:.0f} MB to compile; make it simpler.",
            param=spec.place,
        )

    def _ask_twice(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the reply, of a second process if the first was ended from outside."""
        try:
            return self._ask(job)
        except _EndedError as ended:
            if ended.is_to_blame:
                raise
        return self._ask(job)

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        try:
            return _exchange(self._running(), job, self.max_seconds)
        except _EndedError:
            self._stop()
            raise

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(self.max_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self.num_started += 1
            self._finalizer = weakref.finalize(self, _end, self._process)
            with contextlib.suppress(_EndedError):  # the job's turn will show it
                _exchange(self._process, NOTHING, START_SECONDS)  # not the grammar's time
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def _exchange(
    process: "subprocess.Popen[bytes]", job: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Send a job and return its reply.

    Raises:
        _EndedError: the process was killed or ended during the job.
    """
    from .check_process import receive, send  # imports llguidance: the first grammar pays for it

    assert process.stdin is not None
    assert process.stdout is not None
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    waiting = threading.Timer(seconds, give_up)
    waiting.start()
    reply: dict[str, Any] | None = None
    try:
        send(process.stdin, {"special": {}, "vocab_size": 0, **job})  # type: ignore[arg-type]
        reply = receive(process.stdout)  # type: ignore[arg-type]
    except (OSError, ValueError):  # it died while it was written to, or halfway through
        pass
    finally:
        waiting.cancel()
    if reply is None:
        raise _EndedError(is_to_blame=is_late.is_set() or not _was_ended(process))
    return reply


def _was_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process with closed streams was ended by a signal from outside."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(END_SECONDS) in FROM_OUTSIDE
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class GrammarCompiler:
    """Compiles grammars for the tokens of one model, and caches the ones used last.

    Safe to use from several threads. The token table and the checking process are made for the
    first grammar.

    Args:
        tokens: the model's tokenizer.
        vocab_size: of the model, which may be larger than the tokenizer's.
        end_ids: tokens that end an answer.
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

    def start(self, spec: GrammarSpec) -> "TokenGrammar":
        """Return the state of a new answer under a grammar.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or not within the limits.
            UnsupportedModelError: the model's tokenizer has no end token.
            OverloadedError: too many grammars at once.
        """
        return self.compile(spec).start()

    def compile(self, spec: GrammarSpec) -> "CompiledGrammar":
        """Return the compiled grammar, from the cache if it is there.

        Raises:
            Those of start.
        """
        with self._cache_lock:
            found = self._cache.pop(spec, None)
            if found is not None:
                self._cache[spec] = found
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
        """Return the token table; made once, in seconds for a large vocabulary."""
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
        """Drop the least recently used grammars until the rest fits; the newest stays."""
        total = sum(compiled.num_bytes for compiled in self._cache.values())
        while total > self._cache_bytes and len(self._cache) > 1:
            total -= self._cache.pop(next(iter(self._cache))).num_bytes
