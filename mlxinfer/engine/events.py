"""The events that answer requests: tokens, progress of prompts, ends and errors. No MLX."""

import time
from collections.abc import Mapping
from typing import Any

from ..core import FinishReason, TokenEvent, TokenLogprobs
from ..errors import EngineClosedError, RequestFailedError
from .batch import Batch, CommitResult, SamplingRows, Sequence


def token_events(
    sampling: SamplingRows,
    token_ids: list[int],
    result: CommitResult,
    logprobs: Mapping[int, TokenLogprobs],
) -> list[TokenEvent]:
    """One event for each sampled token, with finish reason and log-probabilities if any.

    Args:
        token_ids: (R,)
        result: which of them ended answers, or are discarded.
    """
    ends: dict[int, FinishReason | BaseException] = {**result.finished, **result.failed}
    sequences = sampling.sequences
    now_s = time.monotonic()
    tokens = [
        TokenEvent(s.request.id, token_id, None, None, None, s.num_cached, None, now_s)
        for s, token_id in zip(sequences, token_ids, strict=True)
    ]
    for row, values in logprobs.items():
        tokens[row] = tokens[row]._replace(logprobs=values)
    if not ends and not result.discarded:  # most steps
        return tokens
    events, discarded = [], set(result.discarded)
    for row, (sequence, event) in enumerate(zip(sequences, tokens, strict=True)):
        if row in ends:
            events += last_events(sequence, event, ends[row])
        elif row not in discarded:
            events.append(event)
    return events


def progress_events(batch: Batch) -> list[TokenEvent]:
    events, now_s = [], time.monotonic()
    for segment in batch.ragged:
        sequence = segment.sequence
        is_asked = sequence.request.reports_prompt and not sequence.finished
        if is_asked and segment.stop <= sequence.num_prompt:
            id, cached = sequence.request.id, sequence.num_cached
            event = TokenEvent(id, None, cached_tokens=cached, made_s=now_s)
            events.append(event._replace(prompt_tokens=segment.stop))
    return events


def prompt_logits_events(read: list[tuple[Sequence, int, Any]]) -> list[TokenEvent]:
    """Logits of prompts; a sequence that was preempted computes some again.

    Args:
        read: sequence, position of the first row, and rows (n, vocab).
    """
    events = []
    for sequence, start, logits in read:
        new = logits[max(sequence.num_logits - start, 0) :]
        if len(new) and not sequence.finished:
            sequence.num_logits = start + len(logits)
            events.append(TokenEvent.without_token(sequence.request.id, prompt_logits=new))
    return events


def last_events(
    sequence: Sequence, token: TokenEvent, end: FinishReason | BaseException
) -> list[TokenEvent]:
    if isinstance(end, BaseException):
        return [token, failed_event(sequence, end)]
    if end is FinishReason.STOP and token.token_id not in sequence.request.stop_ids:
        # The grammar is finished: this token is text, and an event of its own ends it.
        return [token, TokenEvent.without_token(token.request_id, end)]
    return [token._replace(finish_reason=end)]


def failed_event(sequence: Sequence, error: BaseException) -> TokenEvent:
    if not isinstance(error, RequestFailedError | EngineClosedError):
        cause, error = (
            error,
            RequestFailedError(
                f"A step of this request failed after {sequence.num_answered} tokens: "
                f"{type(error).__name__}: {error}"
            ),
        )
        error.__cause__ = cause
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=error)
