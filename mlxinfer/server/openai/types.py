"""Usage and finish reasons, which OpenAI's APIs share."""

from collections.abc import Sequence

import msgspec

from ...core import FinishReason
from ...outputs import Result
from ...session.engine_client import Step
from ..calls.generation import Generation


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Details of the prompt's token count."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Details of the answer's token count."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(generation: Generation, *, choices_a_prompt: int = 1) -> Usage:
    """The token counts of a generation so far; a prompt with several choices counts once."""
    firsts = generation.answers[::choices_a_prompt]
    prompt = sum(len(answer.request.prompt_ids) for answer in firsts)
    cached = sum(answer.result.cached_tokens for answer in firsts if answer.result is not None)
    completion = sum(generation.num_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(generation.reasoning_tokens)
        ),
    )


def usage_log(usage: Usage, reasons: Sequence[str]) -> dict[str, object]:
    """Fields of the access log."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "answer_tokens": usage.completion_tokens,
        "finish_reason": ",".join(sorted(set(reasons))),
    }


def finish_reason(reason: FinishReason) -> str:
    """OpenAI's finish reason. An answer that was aborted raises an error and is never complete."""
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    return str(reason)


class PromptProgress(msgspec.Struct, kw_only=True):
    """How far the prompt of an answer is computed, in llama.cpp's names."""

    total: int
    cache: int  # tokens that were found in the cache; they are processed from the beginning
    processed: int
    time_ms: float


def progress_of(generation: Generation, step: Step) -> PromptProgress:
    """The progress that a step reports."""
    request, event = generation.answers[step.index].request, step.event
    return PromptProgress(
        total=len(request.prompt_ids),
        cache=event.cached_tokens,
        processed=event.prompt_tokens,
        time_ms=1e3 * (event.made_s - request.started_s),
    )


class Timings(msgspec.Struct, kw_only=True):
    """Where the time of one answer went, in llama.cpp's names; a rate is null if there is none."""

    cache_n: int  # prompt tokens found in the cache
    prompt_n: int  # prompt tokens computed
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    queued_ms: float


def timings_of(result: Result) -> Timings:
    """The timings of a complete answer."""
    timing = result.timing
    return Timings(
        cache_n=result.cached_tokens,
        prompt_n=result.prompt_tokens - result.cached_tokens,
        prompt_ms=1e3 * timing.prefill_s,
        prompt_per_second=timing.prompt_tokens_per_s,
        predicted_n=len(result.token_ids),
        predicted_ms=1e3 * timing.decode_s,
        predicted_per_second=timing.tokens_per_s,
        queued_ms=1e3 * timing.queued_s,
    )
