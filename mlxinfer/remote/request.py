"""Inputs to bodies of OpenAI's API, in the fields that mlxinfer serves."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..core import FUNCTIONS, SamplingParams
from ..errors import InvalidRequestError
from ..images import data_url, picture_file
from ..session.inputs import ChatInput, Input, Message, TextInput, as_int, check_sequence
from ..text import ImagePart, WrittenCall, read_messages
from ..text.forms import calls_of
from ..text.template import plain_data, with_reasoning_fields, without_none

UNLIMITED = -1  # of max_tokens: until the context is full


Request = tuple[str, dict[str, Any]]  # a path and the body


class RemoteRequests:
    """Reads inputs into requests of OpenAI's API.

    Args:
        chat_params: the model's own values for conversations; None: the server's defaults hold.
    """

    def __init__(self, model: str, chat_params: SamplingParams | None = None) -> None:
        self._model, self._chat_params = model, chat_params

    def request_of(self, given: Input) -> Request:
        """The request of an input.

        Raises:
            InvalidRequestError: the server cannot do what a value asks.
        """
        if given.constraint is not None or given.n != 1:
            name = "n" if given.n != 1 else "constraint"
            raise _refused(name, "a remote model gives one answer at a time, in a response_format")
        path, body = given.read_by(self)
        if given.response_format is not None:
            body["response_format"] = dict(given.response_format)
        if given.reports_prompt:
            body["return_progress"] = True
        if given.cache_salt is not None:
            body["cache_salt"] = given.cache_salt
        body.update(
            model=self._model if given.adapter is None else f"{self._model}:{given.adapter}",
            stream=True,
            stream_options={"include_usage": True},
            timings=True,
            return_token_ids=True,
        )
        return path, body

    def conversation(self, given: ChatInput, max_context: int | None) -> Request:
        """A chat completion, with the values by which the model would answer in this process."""
        default = given.params or self._chat_params
        values = given.sampling if default is None else _values(given, default)
        body = {"messages": _messages(given.messages), **_sampling(values)}
        if (limit := body.pop("max_reasoning_tokens", None)) is not None:
            body["thinking_budget_tokens"] = limit
        if "logprobs" in body:
            body["logprobs"] = True  # without top_logprobs none but the answer's own
        said = {
            "tools": given.tools,
            "tool_choice": None if given.tool_choice == "auto" else given.tool_choice,
            "parallel_tool_calls": None if given.parallel_tool_calls else False,
            "chat_template_kwargs": dict(given.template_variables) or None,
            "reasoning_effort": given.reasoning_effort,
            "continue_final_message": given.continues or None,
            "add_generation_prompt": given.begins,
        }
        body.update({name: value for name, value in said.items() if value is not None})
        return "/v1/chat/completions", body

    def text(self, given: TextInput, max_context: int | None) -> Request:
        """A completion; every value is sent, so that no default of the server holds."""
        prompt = given.prompt
        if not isinstance(prompt, str):
            check_sequence(prompt)
            prompt = [as_int(token_id) for token_id in prompt]
        values = _values(given, given.params or SamplingParams())
        limit = values.pop("max_reasoning_tokens")
        body = {"prompt": prompt, "reasoning_format": "deepseek", **_sampling(values)}
        if limit is not None:
            body["thinking_budget_tokens"] = limit
        if given.suffix:
            body["suffix"] = given.suffix
        return "/v1/completions", body


class TokenizeRequests(RemoteRequests):
    """Reads inputs into requests of their token ids, for vLLM's /tokenize."""

    def conversation(self, given: ChatInput, max_context: int | None) -> Request:
        if read_messages(given.messages)[1]:
            raise _refused("select", "the ids of pictures are the server's")
        return "/tokenize", super().conversation(given, max_context)[1]

    def text(self, given: TextInput, max_context: int | None) -> Request:
        return "/tokenize", {"prompt": given.prompt}


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    read, images = read_messages(messages)
    waiting = iter(images)
    plain = [with_reasoning_fields(without_none(message)) for message in plain_data(read)]
    for message in plain:
        if isinstance(message.get("content"), list):
            parts = message["content"]
            message["content"] = [
                part if part["type"] == "text" else _picture(next(waiting)) for part in parts
            ]
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call) for call in calls_of(message)]
    return plain


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    written = WrittenCall.of(call)
    function = {"name": written.name, "arguments": written.text}
    return {"id": written.id or None, "type": "function", "function": function}


def _picture(image: ImagePart) -> dict[str, Any]:
    kind = "video_url" if image.is_video else "image_url"
    text = _video_url(image) if image.is_video else data_url(image.source, place=image.place)
    url: dict[str, Any] = {"url": text}
    if image.low_detail:
        url["detail"] = "low"
    return {"type": kind, kind: url}


def _video_url(image: ImagePart) -> str:
    data = picture_file(image.source, image.place)
    if data is None:
        raise _refused("frames", "give a file, or send some frames as pictures")
    return f"data:video/mp4;base64,{b64encode(data).decode()}"  # the data say their own format


def _values(given: Input, default: SamplingParams) -> dict[str, Any]:
    params = default.changed(given.sampling)
    return {field.name: getattr(params, field.name) for field in fields(SamplingParams)}


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(values)
    for name in FUNCTIONS:
        if fields.pop(name, None):
            raise _refused(name, "functions run where the model runs")
    if fields.get("logprobs"):
        raise _refused("logprobs", "a server names other tokens by their text, not by their ids")
    if fields.get("logprobs", 0) is None:
        del fields["logprobs"]
    if "max_tokens" in fields and fields["max_tokens"] is None:
        fields["max_tokens"] = UNLIMITED
    if fields.get("seed", 0) is None:
        del fields["seed"]
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    }


def _refused(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} does not go over HTTP: {reason}.", param=name)
