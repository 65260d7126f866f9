"""Whether prompt and answer fit a model's context. Knows lengths."""

from ..errors import ContextLengthError
from .served import ServedModel


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
