"""Fields that steer the chat template. Knows which variables a request may set, renders nothing."""

from typing import Any, Literal, Protocol

from ...errors import InvalidRequestError
from ..errors import UnsupportedFieldError
from .extent import check_extent
from .refused import refuse

MAX_DEPTH = 8  # of a variable's value
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateFields(Protocol):
    """What requests that a template renders have in common."""

    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: Effort | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: Any
    documents: Any
    mm_processor_kwargs: Any


def effort_variables(effort: Effort | None, source: str) -> dict[str, Any]:
    """The variables by which a template is told how much the model shall reason."""
    if effort is not None and "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    if effort is not None and "enable_thinking" in source:
        return {"enable_thinking": effort != "none"}
    return {}


def template_kwargs(
    fields: TemplateFields, *, allowed: frozenset[str], source: str
) -> dict[str, Any]:
    """Keyword arguments of `encode_chat`.

    reasoning_effort becomes the template's variable of this name; where a template only knows
    enable_thinking, "none" switches it off. A template without either has nothing to steer.

    Raises:
        InvalidRequestError: a variable that clients may not set, or a value that is none.
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
    check_extent(kwargs, param="chat_template_kwargs", max_depth=MAX_DEPTH)
    kwargs = {**effort_variables(fields.reasoning_effort, source), **kwargs}
    goes_on = bool(fields.continue_final_message)
    begins = not goes_on if fields.add_generation_prompt is None else fields.add_generation_prompt
    if goes_on and begins:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return {**kwargs, "add_generation_prompt": begins, "continue_final_message": goes_on}
