"""Messages of a chat request: checked, converted for the chat template, and encoded."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...errors import InvalidRequestError, TemplateError
from ..errors import UnsupportedFieldError
from ..fields.prompt import (
    TemplateFields,
    check_messages,
    template_kwargs,
    text_check,
)
from ..fields.tools import call_arguments
from ..registry.served import ServedModel
from .declared_tools import INPUT

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of a call; its arguments are JSON in a string."""

    name: str
    arguments: str = "{}"


class CustomCall(msgspec.Struct, kw_only=True):
    """The custom tool of a call; its input is plain text."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an earlier answer of the assistant."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of the same
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None


def template_messages(messages: Sequence[Message], *, source: str) -> list[dict[str, Any]]:
    """The messages as chat templates read them.

    Text parts are joined by newlines. Arguments of tool calls become objects. A developer's message
    becomes a system message for templates (`source`) that do not know the role.

    Raises:
        InvalidRequestError: there is no message, or one is incomplete.
        UnsupportedFieldError: images, audio and other parts that are not text.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one.", param="messages")
    return [_plain(message, f"messages[{index}]", source) for index, message in enumerate(messages)]


def _plain(message: Message, path: str, source: str) -> dict[str, Any]:
    if message.audio is not None or message.function_call is not None:
        field = "audio" if message.audio is not None else "function_call"
        raise UnsupportedFieldError(f"{path}.{field} is not supported.", param=f"{path}.{field}")
    if message.role == "function":
        raise UnsupportedFieldError(
            f"{path}: the role function is not supported; use tool.", param=f"{path}.role"
        )
    content = _text(message.content, f"{path}.content")
    if content is None:
        content = message.refusal
    if content is None and message.role == "tool":  # a tool that says nothing
        content = ""
    if content is None and message.role != "assistant":
        raise InvalidRequestError(f"{path}.content is missing.", param=f"{path}.content")
    plain: dict[str, Any] = {"role": _role(message.role, source), "content": content}
    if content is None and not message.tool_calls:
        plain["content"] = ""
    reasoning = message.reasoning_content or message.reasoning
    optional = {
        "name": message.name,
        "reasoning_content": reasoning,
        "tool_call_id": message.tool_call_id,
    }
    plain.update({key: value for key, value in optional.items() if value is not None})
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _role(role: str, source: str) -> str:
    return "system" if role == "developer" and "developer" not in source else role


def _text(content: str | list[Part] | None, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "\n".join([_part_text(part, f"{path}[{index}]") for index, part in enumerate(content)])


def _part_text(part: Part, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise UnsupportedFieldError(
            f"{path} is of type {part.type[:50]!r}; this model reads text only.",
            param=f"{path}.type",
        )
    if text is None:
        raise InvalidRequestError(f"{path}.text is missing.", param=f"{path}.text")
    return text


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    if call.type == "custom" and call.custom is not None:
        function = {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
    elif call.type == "function" and call.function is not None:
        arguments = call_arguments(call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
    else:
        raise InvalidRequestError(
            f"{path}.{call.type} is missing, and is required.", param=f"{path}.{call.type}"
        )
    return {"id": call.id, "type": "function", "function": function}


def encode_conversation(
    model: ServedModel,
    messages: Sequence[Message],
    fields: TemplateFields,
    *,
    allowed: frozenset[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    bounded: bool = True,
) -> list[int]:
    """The token ids of the prompt.

    Args:
        model: its chat template and tokenizer are used.
        messages: of the request.
        fields: of the same request; they set variables of the template.
        allowed: names that chat_template_kwargs may hold.
        tools: shown to the model by the template.
        bounded: refuse what is far too long for the context before it is encoded.

    Raises:
        TemplateError: the model has no template, or the template refuses the messages.
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
    return model.builder.encode_chat(
        plain,
        text_check(model, param="messages") if bounded else None,
        tools=tools,
        **template_kwargs(fields, allowed=allowed, source=source),
    )
