"""Log-probabilities as OpenAI's APIs write them. Knows tokens and their bytes, no requests."""

from collections.abc import Sequence

import msgspec

from ...answer import Answer
from ...core import FinishReason, TokenEvent, TokenLogprobs
from ...text import Tokenizer
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
