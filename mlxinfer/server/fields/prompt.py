"""Fields that make the prompt, whichever API they came by: template variables, tools, lengths."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from ...core import SamplingParams
from ...errors import InvalidRequestError
from ...text import ToolUse
from ...text.tokenizer import exceeds_tokens
from ..errors import PromptTooLongError, UnsupportedFieldError
from ..registry.served import ServedModel
from .checks import MAX_DEPTH, check_json_size, refuse

MAX_VARIABLE_DEPTH = 8  # levels of JSON of a template variable
MAX_TOOLS = 512
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateFields(Protocol):
    """Fields of requests that a chat template renders."""

    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: Effort | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: Any
    documents: Any
    mm_processor_kwargs: Any


def effort_variables(effort: Effort | None, source: str) -> dict[str, Any]:
    """The variables that tell a template (`source`) how much the model shall reason."""
    if effort is not None and "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    if effort is not None and "enable_thinking" in source:
        return {"enable_thinking": effort != "none"}
    return {}


def template_kwargs(
    fields: TemplateFields, *, allowed: frozenset[str], source: str
) -> dict[str, Any]:
    """Keyword arguments of `encode_chat`.

    reasoning_effort becomes the template's variable of this name; for a template that only reads
    enable_thinking, "none" switches it off. It has no effect on a template without either.

    Raises:
        InvalidRequestError: a variable that clients may not set, or an invalid value.
        UnsupportedFieldError: a template in the request, or documents.
    """
    refuse("chat_template", fields.chat_template)
    refuse("documents", fields.documents, ([],))
    refuse("mm_processor_kwargs", fields.mm_processor_kwargs, ({},))
    kwargs = dict(fields.chat_template_kwargs or {})
    for name in kwargs:
        if name not in allowed:
            raise UnsupportedFieldError(
                f"chat_template_kwargs may hold {', '.join(sorted(allowed))}; not {name[:50]!r}.",
                param="chat_template_kwargs",
            )
    check_json_size(kwargs, param="chat_template_kwargs", max_depth=MAX_VARIABLE_DEPTH)
    kwargs = {**effort_variables(fields.reasoning_effort, source), **kwargs}
    continues = bool(fields.continue_final_message)
    begins = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continues and begins:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return {**kwargs, "add_generation_prompt": begins, "continue_final_message": continues}


def tool_use(
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None = None,
) -> ToolUse | None:
    """How a request uses tools; None: not at all.

    Raises:
        InvalidRequestError: a tool or the choice is wrong.
        TemplateError: the model's template knows no tools.
    """
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{len(tools)} tools; at most {MAX_TOOLS} are accepted.", param="tools"
        )
    check_json_size(tools, param="tools", max_depth=MAX_DEPTH)
    check_json_size(choice, param="tool_choice", max_depth=MAX_DEPTH)
    return model.builder.tool_use(tools, choice, parallel=parallel is not False)


def room_for_answer(model: ServedModel, num_prompt: int, *, param: str) -> int:
    """Tokens that the context leaves to the answer; raise PromptTooLongError if there are none."""
    if num_prompt >= model.max_context:
        raise PromptTooLongError(num_prompt, model.max_context, param=param, exact=True)
    return model.max_context - num_prompt


def fitted(
    model: ServedModel, params: Sequence[SamplingParams], num_prompt: int, *, param: str
) -> list[SamplingParams]:
    """The parameters with max_tokens reduced to what the context leaves; raises as above."""
    room = room_for_answer(model, num_prompt, param=param)
    return [
        replace(each, max_tokens=room) if (each.max_tokens or 0) > room else each for each in params
    ]


def check_texts(model: ServedModel, texts: Sequence[str], *, param: str) -> None:
    """Raise PromptTooLongError for texts that are far too long, before they are encoded whole."""
    encode = partial(model.tokenizer.encode, add_special_tokens=False, parse_special=True)
    if exceeds_tokens(encode, texts, model.max_context):
        context = model.max_context
        raise PromptTooLongError(context, context, param=param, exact=False)


def text_check(model: ServedModel, *, param: str) -> Callable[[str], None]:
    """A check of a prompt's text before it is encoded; raises as `check_texts`."""
    return lambda text: check_texts(model, [text], param=param)


def check_messages(
    model: ServedModel, messages: Iterable[Mapping[str, Any]], *, param: str
) -> None:
    """Raise PromptTooLongError for messages, as templates read them, that are far too long."""
    texts = [text for message in messages for text in _texts(message)]
    if len(texts) > model.max_context:  # a template writes at least one token for each
        raise PromptTooLongError(len(texts), model.max_context, param=param, exact=False)
    check_texts(model, texts, param=param)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """The content, and the arguments of calls, which templates write as JSON."""
    if isinstance(message.get("content"), str):
        yield message["content"]
    for call in message.get("tool_calls", ()):
        yield msgspec.json.encode(call["function"]["arguments"]).decode()
