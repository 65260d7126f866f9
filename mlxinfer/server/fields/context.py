"""Whether prompt and answer fit a model's context. Knows lengths."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import ContextLengthError
from ...text.lengths import far_longer
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
    if far_longer(model.tokenizer, texts, model.max_context):
        raise _more_than_fit(model, param)


def check_messages(
    model: ServedModel, messages: Iterable[Mapping[str, Any]], *, param: str
) -> None:
    """Raise ContextLengthError where messages, as templates read them, are far too long."""
    texts = [m["content"] for m in messages if isinstance(m.get("content"), str)]
    if len(texts) > model.max_context:  # templates write a token for each at least
        raise _more_than_fit(model, param)
    check_texts(model, texts, param=param)


def _more_than_fit(model: ServedModel, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"The prompt has more than {model.max_context} tokens, which is what the context holds; "
        "shorten it.",
        param=param,
    )
