"""Log-probabilities as OpenAI's APIs write them: entries in chat, parallel lists in completions."""

import codecs
from collections.abc import Sequence

import msgspec

from ...core import FinishReason, TokenEvent, TokenLogprobs
from ...session.output_processor import OutputProcessor
from ...text import Detokenizer, Tokenizer
from ..registry.served import ServedModel

LEAST = -9999.0  # JSON has no -Infinity


class TopLogprob(msgspec.Struct, kw_only=True):
    """One of the most probable tokens."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, kw_only=True):
    """The sampled token and the most probable ones."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token except an end token."""

    content: list[TokenLogprob] | None
    refusal: None = None


def chat_logprobs(model: ServedModel, event: TokenEvent) -> ChoiceLogprobs | None:
    """The entry of one token; None: not asked for, or an end token."""
    ended = event.finish_reason is FinishReason.STOP
    if event.logprobs is None or event.token_id is None or ended:
        return None
    return ChoiceLogprobs(content=[_entry(model.tokenizer, event.token_id, event.logprobs)])


def chat_logprobs_of(model: ServedModel, answer: OutputProcessor) -> ChoiceLogprobs | None:
    """The entries of a complete answer; None: not asked for."""
    assert answer.result is not None
    if answer.result.logprobs is None:
        return None
    pairs = zip(shown_ids(answer), answer.result.logprobs, strict=False)
    return ChoiceLogprobs(content=[_entry(model.tokenizer, i, found) for i, found in pairs])


def shown_ids(answer: OutputProcessor) -> Sequence[int]:
    """The token ids of a complete answer without its end token."""
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
    """The log-probability, at least LEAST."""
    return max(logprob, LEAST)


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists with one entry a token. A prompt's first token has no log-probability.

    The end token of an answer has an entry, so that there is one for every generated token, which
    evaluation harnesses rely on.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class LogprobsWriter:
    """Writes the entries of one choice, at once or in chunks.

    Args:
        tokenizer: of the model.
        offset: number of characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lists = _empty()

    def add(self, token_id: int, found: TokenLogprobs | None) -> None:
        """Add one token; `found` is None for the first one of a prompt."""
        lists = self._lists
        lists.tokens.append(self._spelled(token_id))
        lists.text_offset.append(self._offset)
        lists.token_logprobs.append(None if found is None else finite(found.logprob))
        lists.top_logprobs.append(None if found is None else self._top(token_id, found))
        if token_id not in self._tokenizer.special_ids:  # those are not in the text
            self._offset += self._num_characters(token_id)

    def take(self) -> CompletionLogprobs:
        """The entries added since the last call."""
        lists, self._lists = self._lists, _empty()
        return lists

    def _num_characters(self, token_id: int) -> int:
        """The characters that a token adds; some decoders strip the text's first space."""
        spelled = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._offset:
            return len(spelled)
        first = Detokenizer(self._tokenizer)
        return min(len(spelled), len(first.push(token_id) + first.flush()))

    def _top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the sampled one if it is not among them."""
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
