"""Log-probabilities as /v1/completions writes them: four parallel lists. Knows tokens, no requests.

The token that ended an answer has an entry, so that there is one for every generated token, which
evaluation harnesses count on.
"""

import codecs

import msgspec

from ...core import TokenLogprobs
from ...text import Detokenizer, Tokenizer
from .logprobs import finite


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token. A prompt's first token has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class LogprobsWriter:
    """Writes the entries of one choice, in one piece or in chunks.

    Args:
        tokenizer: whose tokens these are.
        offset: characters of the text before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lists = _empty()

    def add(self, token_id: int, found: TokenLogprobs | None) -> None:
        """Write one token; None: the first of a prompt."""
        lists = self._lists
        lists.tokens.append(self._spelled(token_id))
        lists.text_offset.append(self._offset)
        lists.token_logprobs.append(None if found is None else finite(found.logprob))
        lists.top_logprobs.append(None if found is None else self._top(token_id, found))
        if token_id not in self._tokenizer.special_ids:  # those are not in the text
            self._offset += self._num_characters(token_id)

    def take(self) -> CompletionLogprobs:
        """What was written since the last time."""
        lists, self._lists = self._lists, _empty()
        return lists

    def _num_characters(self, token_id: int) -> int:
        """How many a token adds to the text, whose first space some decoders take off."""
        spelled = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._offset:
            return len(spelled)
        first = Detokenizer(self._tokenizer)
        return min(len(spelled), len(first.push(token_id) + first.flush()))

    def _top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the one that came if it is none of them."""
        top = {self._spelled(i): finite(logprob) for i, logprob in found.top}
        top.setdefault(self._spelled(token_id), finite(found.logprob))
        return top

    def _spelled(self, token_id: int) -> str:
        """The token's text, or its bytes where it is not whole characters."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _empty() -> CompletionLogprobs:
    return CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
