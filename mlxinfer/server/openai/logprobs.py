"""Log-probabilities as OpenAI's APIs write them: entries in chat, parallel lists in completions."""

import codecs
from collections.abc import Sequence

import msgspec

from ...answer import Answer
from ...core import FinishReason, TokenEvent, TokenLogprobs
from ...text import Detokenizer, Tokenizer
from ..registry.served import ServedModel

LEAST = -9999.0  # JSON has no -Infinity


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that might have come."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, kw_only=True):
    """The token that came, and the most probable ones."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token, the one that ended the answer left out."""

    content: list[TokenLogprob] | None
    refusal: None = None


def chat_logprobs(model: ServedModel, event: TokenEvent) -> ChoiceLogprobs | None:
    """Of one token of a stream; None where none were asked for, or the token is the end."""
    ended = event.finish_reason is FinishReason.STOP
    if event.logprobs is None or event.token_id is None or ended:
        return None
    return ChoiceLogprobs(content=[_entry(model.tokenizer, event.token_id, event.logprobs)])


def chat_logprobs_of(model: ServedModel, answer: Answer) -> ChoiceLogprobs | None:
    """Of a complete answer; None where none were asked for."""
    assert answer.result is not None
    if answer.result.logprobs is None:
        return None
    pairs = zip(shown_ids(answer), answer.result.logprobs, strict=False)
    return ChoiceLogprobs(content=[_entry(model.tokenizer, i, found) for i, found in pairs])


def shown_ids(answer: Answer) -> Sequence[int]:
    """The tokens of a complete answer, without one that ended it."""
    assert answer.result is not None
    ids = answer.result.token_ids
    ended = answer.result.finish_reason is FinishReason.STOP and ids
    return ids[:-1] if ended and ids[-1] in answer.request.stop_ids else ids


def _entry(tokenizer: Tokenizer, token_id: int, found: TokenLogprobs) -> TokenLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TokenLogprob(
        token=raw.decode(errors="replace"),
        bytes=list(raw),
        logprob=finite(found.logprob),
        top_logprobs=[_top(tokenizer, *pair) for pair in found.top],
    )


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(token=raw.decode(errors="replace"), bytes=list(raw), logprob=finite(logprob))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST)


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
