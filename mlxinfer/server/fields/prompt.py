"""Fields that make the prompt, whichever API they came by: template variables, gaps, lengths."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from ...core import SamplingParams
from ...errors import InvalidRequestError
from ...text import Tokenizer, fim_tokens
from ...text.tokenizer import exceeds_tokens
from ..errors import PromptTooLongError, UnsupportedFieldError
from ..registry.served import ServedModel
from .checks import check_json_size, refuse

MAX_VARIABLE_DEPTH = 8  # levels of JSON of a template variable
_FILE_MARKS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and its text, which may be echoed."""

    ids: list[int]
    text: str
    half: str = ""  # U+FFFD for half a character at the end, which the answer may complete
    end_ids: frozenset[int] = frozenset()  # tokens that end the answer to this prompt


def infill_prompt(
    model: ServedModel, prefix: str, suffix: str, *, files: Sequence[tuple[str, str]] = ()
) -> Prompt:
    """The prompt for the text between `prefix` and `suffix`, after other files (name, text).

    Raises:
        UnsupportedFieldError: the model has no tokens for this.
        PromptTooLongError: it does not fit.
    """
    tokens = fim_tokens(model.tokenizer)
    if tokens is None:
        raise UnsupportedFieldError(
            f"The model {model.name!r} has no tokens for filling in the middle; code models have.",
            param="suffix",
        )
    check_texts(model, [prefix, suffix, *(text for _, text in files)], param="prompt")
    before = [i for name, text in files for i in _file_ids(model.tokenizer, name, text)]
    ids = tokens.prompt_ids(model.tokenizer, prefix, suffix, before=before)
    room_for_answer(model, len(ids), param="prompt")
    return Prompt(ids, prefix, end_ids=tokens.end_ids)


def _file_ids(tokenizer: Tokenizer, name: str, text: str) -> list[int]:
    """One of the other files, behind the token that separates files if the model has one."""
    found = (tokenizer.piece_to_id(mark) for mark in _FILE_MARKS)
    mark = next((i for i in found if i is not None), None)
    head = [] if mark is None else [mark]
    return head + tokenizer.encode_plain(f"{name}\n{text}\n")
