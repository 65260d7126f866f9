"""Token counts, times and log-probabilities as OpenAI's APIs and llama.cpp write them."""

import codecs
from collections.abc import Sequence
from typing import Any

from ... import __version__
from ...core import FinishReason, TokenLogprobs
from ...outputs import PromptProgress, Result
from ...session.answers import Answer, Answers, AnswerStep
from ...text import Tokenizer
from ..http import Plain
from ..reuse import ReuseRecord

FINGERPRINT = f"mlxinfer-{__version__}"  # OpenAI's system_fingerprint
LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
LEAST = -9999.0  # JSON has no -Infinity


def usage_of(answers: Answers, reused: Plain, *, left_out: int = 0) -> Plain:
    """The token counts so far, all choices together; a prompt with several choices counts once.

    Args:
        reused: `reuse_details`.
        left_out: generated tokens that the client does not get.
    """
    usage = answers.usage
    completion = usage.answer_tokens - left_out
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": usage.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **reused},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def reuse_details(reuse: ReuseRecord | None, is_asked: bool | None) -> Plain:
    """Tokens of the first prompt that were reused, by tier, and why no more, if a client asks."""
    if reuse is None or not is_asked:
        return {}
    return {"cached_tokens_details": {**reuse.shown["tiers"], **reuse.without_text()}}


def progress_of(progress: PromptProgress) -> Plain:
    return {
        "total": progress.total,
        "cache": progress.cached,  # they are processed from the beginning
        "processed": progress.computed,
        "time_ms": 1e3 * progress.seconds,
    }


def timings_of(result: Result) -> Plain:
    """The times of one answer, in llama.cpp's names; a rate is null if there is none."""
    timing = result.timing
    return {
        "cache_n": result.cached_tokens,
        "prompt_n": result.prompt_tokens - result.cached_tokens,  # computed
        "prompt_ms": 1e3 * timing.prefill_s,
        "prompt_per_second": timing.prompt_tokens_per_s,
        "predicted_n": len(result.token_ids),
        "predicted_ms": 1e3 * timing.decode_s,
        "predicted_per_second": timing.tokens_per_s,
        "queued_ms": 1e3 * timing.queued_s,
    }


# -- log-probabilities: entries in chat, parallel lists in completions --------------------------


def logprob_of(tokenizer: Tokenizer, answer: Answer, step: AnswerStep) -> list[Plain]:
    """The entry of a step's token; none: it was not asked for, or the token ends the answer."""
    ids = step.delta.token_ids
    if step.logprobs is None or not ids or _is_end(answer, ids[-1]):
        return []
    return [_entry(tokenizer, ids[0], step.logprobs)]


def logprobs_of(tokenizer: Tokenizer, answer: Answer) -> list[Plain] | None:
    """The entries of a complete answer; None: they were not asked for."""
    result = answer.result
    assert result is not None
    if result.logprobs is None:
        return None
    ids: Sequence[int] = result.token_ids
    ids = ids[:-1] if ids and _is_end(answer, ids[-1]) else ids
    pairs = zip(ids, result.logprobs, strict=False)
    return [_entry(tokenizer, i, score) for i, score in pairs]


def _is_end(answer: Answer, token_id: int) -> bool:
    result = answer.result
    ended = result is not None and result.finish_reason is FinishReason.STOP
    return ended and token_id in answer.request.stop_ids


def _entry(tokenizer: Tokenizer, token_id: int, score: TokenLogprobs) -> Plain:
    def scored(token_id: int, logprob: float) -> Plain:
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode(errors="replace")
        return {"token": text, "bytes": list(raw), "logprob": _finite(logprob)}

    top = [scored(*pair) for pair in score.top]
    return {**scored(token_id, score.logprob), "top_logprobs": top}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


class LogprobsWriter:
    """Writes parallel lists with an entry for each token of one choice, at once or in chunks.

    A prompt's first token has no log-probability. The end token of an answer has an entry, so that
    there is one for every generated token, which evaluation harnesses rely on.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lists: dict[str, list[Any]] = {name: [] for name in LISTS}

    def add(self, token_id: int, score: TokenLogprobs | None) -> None:
        lists = self._lists
        lists["text_offset"].append(self._offset)
        lists["token_logprobs"].append(None if score is None else _finite(score.logprob))
        lists["tokens"].append(self._spelled(token_id))
        lists["top_logprobs"].append(None if score is None else self._top(token_id, score))
        if token_id not in self._tokenizer.special_ids:  # those are not in the text
            self._offset += self._num_characters(token_id)

    def take(self) -> Plain:
        lists, self._lists = self._lists, {name: [] for name in LISTS}
        return lists

    def _num_characters(self, token_id: int) -> int:
        """The characters that a token adds; some decoders strip the text's first space."""
        spelled = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._offset:
            return len(spelled)
        return min(len(spelled), len(self._tokenizer.decode([token_id])))

    def _top(self, token_id: int, score: TokenLogprobs) -> dict[str, float]:
        top = {self._spelled(i): _finite(logprob) for i, logprob in score.top}
        top.setdefault(self._spelled(token_id), _finite(score.logprob))
        return top

    def _spelled(self, token_id: int) -> str:
        """The token's text, or its bytes where it is not whole characters."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
