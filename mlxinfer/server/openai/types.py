"""Types that OpenAI's chat and completions share: usage, finish reasons. Knows no handlers."""

from collections.abc import Sequence

import msgspec

from ...core import FinishReason
from ..calls.generation import Generation


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Of the answer's tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one call, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(generation: Generation, *, choices_a_prompt: int = 1) -> Usage:
    """The counts of a finished generation; a prompt with several choices counts once."""
    results = [a.result for a in generation.answers if a.result is not None]
    firsts = results[::choices_a_prompt]
    prompt = sum(result.prompt_tokens for result in firsts)
    completion = sum(generation.num_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(result.cached_tokens for result in firsts)
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(generation.reasoning_tokens)
        ),
    )


def usage_log(usage: Usage, reasons: Sequence[str]) -> dict[str, object]:
    """What the access log says of a generation."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "answer_tokens": usage.completion_tokens,
        "finish_reason": ",".join(sorted(set(reasons))),
    }


def finish_reason(reason: FinishReason) -> str:
    """As OpenAI calls it. An aborted answer of a closing engine is never complete: an error."""
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    return str(reason)
