"""Calls of LLM to bodies of OpenAI's API, in the fields that mlxinfer serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..core import SamplingParams
from ..errors import InvalidRequestError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
UNLIMITED = -1  # of max_tokens: until the context is full
_ENDS = ("add_generation_prompt", "continue_final_message")  # fields of their own in the API
_REFUSED = {
    "logprobs": "a server names tokens by their text, not by their ids",
}


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """One request: where it goes and what it says."""

    path: str
    body: dict[str, Any]


def text_request(
    model: str, prompt: str | Sequence[int], params: SamplingParams, form: Mapping[str, Any] | None
) -> RemoteRequest:
    """A request to continue a prompt; every value is sent, so that no default of the server holds.

    Raises:
        InvalidRequestError: the server cannot do what a value asks.
    """
    values = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
    if values.pop("max_reasoning_tokens") is not None:
        raise _refused("max_reasoning_tokens", "the continuation of a text has no reasoning")
    body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **_sampling(values)}
    return RemoteRequest(TEXT, _complete(model, body, form))


def chat_request(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    *,
    response_format: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **tools: Any,
) -> RemoteRequest:
    """A request to answer a conversation; what `values` leave out is the server's to choose.

    Raises:
        InvalidRequestError: the server cannot do what a value asks.
    """
    body = {"messages": [dict(message) for message in messages], **_sampling(values)}
    if (limit := body.pop("max_reasoning_tokens", None)) is not None:
        body["thinking_budget_tokens"] = limit
    body.update({name: value for name, value in tools.items() if value is not None})
    variables = dict(chat_template_kwargs or {})
    body.update({name: variables.pop(name) for name in _ENDS if name in variables})
    if variables:
        body["chat_template_kwargs"] = variables
    return RemoteRequest(CHAT, _complete(model, body, response_format))


def _complete(model: str, body: dict[str, Any], form: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body with what is the same in every request."""
    if form is not None:
        body["response_format"] = dict(form)
    options = {"include_usage": True}
    return {
        "model": model,
        **body,
        "stream": True,
        "stream_options": options,
        "timings": True,
        "return_token_ids": True,
    }


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams in the API's words."""
    neutral = {"logprobs": None}
    found = dict(values)
    for name, reason in _REFUSED.items():
        if found.pop(name, neutral[name]) != neutral[name]:
            raise _refused(name, reason)
    if "max_tokens" in found and found["max_tokens"] is None:
        found["max_tokens"] = UNLIMITED
    if found.get("seed", 0) is None:
        del found["seed"]
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"].items()}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in found.items()
    }


def _refused(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} does not go over HTTP: {reason}.", param=name)
