"""A conversation in a request to token ids. Knows template and tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import TemplateError
from ...text import encode_chat
from ..fields.context import check_messages, text_check
from ..fields.template import TemplateFields, template_kwargs
from ..registry.served import ServedModel
from .chat_messages import Message, template_messages


def encode_conversation(
    model: ServedModel,
    messages: Sequence[Message],
    fields: TemplateFields,
    *,
    allowed: frozenset[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    bounded: bool = True,
) -> list[int]:
    """The prompt's ids.

    Args:
        model: whose chat template is used.
        messages: as they came.
        fields: of the same request, for the template.
        allowed: names that chat_template_kwargs may hold.
        tools: that the template shows to the model.
        bounded: whether what is far too long is refused before it is encoded.

    Raises:
        TemplateError: the model has no template, or it refuses the messages.
        ContextLengthError: messages and tools cannot fit.
        InvalidRequestError: messages or fields are wrong.
    """
    template = model.tokenizer.template
    if template is None:
        raise TemplateError(f"The model {model.name!r} has no chat template; use /v1/completions.")
    source = template.source_for(tools)
    plain = template_messages(messages, source=source)
    if bounded:
        check_messages(model, plain, param="messages")
    return encode_chat(
        model.tokenizer,
        plain,
        text_check(model, param="messages") if bounded else None,
        tools=tools,
        **template_kwargs(fields, allowed=allowed, source=source),
    )
