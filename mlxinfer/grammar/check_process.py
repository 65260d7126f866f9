"""Compiles untrusted grammars in a process that may be killed (`killable`). A job is

    {"source": ..., "schemas": [[place, text], ...], "is_free": ...,
     "special": {token id: text}, "vocab_size": ...}

and its reply {} for a sound grammar, or

    {"error": message, "place": of the schema at fault or null}
"""

import json
import re
from typing import Any

import llguidance

from ..killable import Packet, serve

LIMITS: dict[str, Any] = {  # llguidance's own, here and where the grammar is used
    "max_items_in_row": 5000,  # an object with n optional properties needs 4 n
    "max_lexer_states": 100_000,  # one or two kilobytes each
    "verbose_errors": False,  # no state, which may hold what others wrote
}
# Of a mask. The time goes with its square where a grammar is ambiguous, as Lark easily is: with the
# 50,000 of large schemas a mask took 2.8 s.
MAX_FREE_ITEMS = 5000
MAX_FORCED = 64  # tokens of the grammar's beginning that are tried, while there is one way only
STATE = re.compile("<state>|<non-verbose/>")  # what comes after it in a message is no reason
LOCATION = re.compile(r"^at [0-9]+\([0-9]+\): (?:failed to compile JSON schema: )?")  # in Lark


def parser_limits(*, is_free: bool) -> "llguidance.LLParserLimits":
    items = {"step_max_items": MAX_FREE_ITEMS} if is_free else {}
    return llguidance.LLParserLimits(**LIMITS, **items)


class ByteTokenizer:
    """A tokenizer of the 256 bytes and a model's control tokens, these at their ids."""

    bos_token_id = None

    def __init__(self, special: dict[int, str], vocab_size: int) -> None:
        free = (i for i in range(vocab_size + 257) if i not in special)
        self._ids = [next(free) for _ in range(256)]
        self.eos_token_id = next(free)
        size = max(vocab_size, self.eos_token_id + 1)
        self.tokens = [b""] * size
        for byte, token_id in enumerate(self._ids):
            self.tokens[token_id] = bytes([byte])
        for token_id, text in {**special, self.eos_token_id: "<end>"}.items():
            self.tokens[token_id] = text.encode()
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._ids[byte] for byte in data]


class GrammarChecker:
    """Finds out whether a grammar can be compiled and has a beginning."""

    def __init__(self) -> None:
        self._special: dict[str, str] = {}
        self._tokens = ByteTokenizer({}, 0)
        self._make_table()

    def _make_table(self) -> None:
        self._table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self._tokens))

    def use_tokens(self, special: dict[str, str], vocab_size: int) -> None:
        if special != self._special or vocab_size > len(self._tokens.tokens):
            self._special = special
            self._tokens = ByteTokenizer({int(i): text for i, text in special.items()}, vocab_size)
            self._make_table()

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        self.use_tokens(job["special"], job["vocab_size"])
        error = self.error_of(job["source"], is_free=job["is_free"])
        if error is None:
            return {}
        for place, text in job["schemas"]:
            problem = self.error_of_schema(json.loads(text))
            if problem is not None:
                return {"error": problem, "place": place}
        if job["schemas"]:  # what follows the first line quotes the generated grammar
            error = LOCATION.sub("", error.partition("\n")[0])
        return {"error": error, "place": None}

    def error_of(self, source: str, *, is_free: bool = False) -> str | None:
        """Return why a grammar cannot be used, None if it can."""
        limits = parser_limits(is_free=is_free)
        matcher = llguidance.LLMatcher(self._table, source, log_level=0, limits=limits)
        for _ in range(MAX_FORCED):
            if matcher.is_error():
                return readable(matcher.get_error())
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                return readable(matcher.get_error())
            if mask.bit_count() != 1 or matcher.is_accepting():
                return None
            matcher.consume_token(mask.bit_length() - 1)
        return None

    def error_of_schema(self, schema: Any) -> str | None:
        """Return why a JSON schema cannot be used, None if it can."""
        return self.error_of(json.dumps({"grammars": [{"json_schema": schema}]}))


def readable(message: str) -> str:
    """Return an error of llguidance without its parser state, which may hold other users' text."""
    first = STATE.split(message)[0].strip()
    if first.startswith("NoExtension"):
        return "no text satisfies it"
    return first[:400] or "it cannot be compiled"


if __name__ == "__main__":
    checker = GrammarChecker()
    serve(lambda job: Packet(checker.answer(job.value)))
