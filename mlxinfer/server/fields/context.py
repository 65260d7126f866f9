"""Whether prompt and answer fit a model's context. Knows lengths."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ...errors import ContextLengthError
from ...text.tokenizer import far_longer
from ..registry.served import ServedModel


def check_room(model: ServedModel, num_prompt: int, max_tokens: int | None, *, param: str) -> None:
    """Raise ContextLengthError, with the numbers, where they do not fit together."""
    wanted = max_tokens or 1
    if num_prompt + wanted <= model.max_context:
        return
    answer = f" and the answer may take {max_tokens}" if max_tokens else ""
    raise ContextLengthError(
        f"The prompt has {num_prompt} tokens{answer}, but the context holds "
        f"{model.max_context}; shorten {'one of them' if max_tokens else 'the prompt'}.",
        param=param,
    )


def check_texts(model: ServedModel, texts: Sequence[str], *, param: str) -> None:
    """Raise ContextLengthError where texts are far too long, before all of them are encoded."""
    encode = partial(model.tokenizer.encode, add_special_tokens=False, parse_special=True)
    if far_longer(encode, texts, model.max_context):
        raise _more_than_fit(model, param)


def text_check(model: ServedModel, *, param: str) -> Callable[[str], None]:
    """What raises ContextLengthError for a prompt's text, before it is encoded."""
    return lambda text: check_texts(model, [text], param=param)


def check_messages(
    model: ServedModel, messages: Iterable[Mapping[str, Any]], *, param: str
) -> None:
    """Raise ContextLengthError where messages, as templates read them, are far too long."""
    texts = [text for message in messages for text in _texts(message)]
    if len(texts) > model.max_context:  # templates write a token for each at least
        raise _more_than_fit(model, param)
    check_texts(model, texts, param=param)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Its content, and the arguments of its calls, which templates write as JSON."""
    if isinstance(message.get("content"), str):
        yield message["content"]
    for call in message.get("tool_calls", ()):
        yield msgspec.json.encode(call["function"]["arguments"]).decode()


def _more_than_fit(model: ServedModel, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"The prompt has more than {model.max_context} tokens, which is what the context holds; "
        "shorten it.",
        param=param,
    )
