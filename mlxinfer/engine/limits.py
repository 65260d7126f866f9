"""The limits of an engine that a request must fit into. Read by callers' threads. No MLX."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ..core import Request
from ..errors import (
    ContextLengthError,
    InsufficientMemoryError,
    InvalidRequestError,
    check_token_ids,
    shown,
)
from ..memory import human_bytes
from .prompt_pictures import PictureLimits


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Pages of one layer group."""

    num_pages: int
    page_bytes: int
    max_pages: int  # that one sequence holds at once, however long it is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits that a request must fit into, for the threads of callers.

    The engine hands it over when it is ready, and makes a new one after each restart. It never
    changes, so no caller reads the loop's own objects.
    """

    vocab_size: int
    page_size: int  # tokens
    max_context: int  # tokens of prompt and answer of one request
    max_positions: int  # that the KV cache holds of one sequence, if it runs alone
    groups: tuple[GroupLimits, ...]
    max_batch: int = 1  # requests that run at once
    adapters: tuple[str, ...] = ()  # that requests may name
    pictures: PictureLimits = field(default_factory=PictureLimits)

    def check(self, request: Request) -> int:
        """How many tokens the answer of a request may have at most.

        Raises:
            InvalidRequestError, ContextLengthError, InsufficientMemoryError: it can never run.
        """
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequestError(
                "The prompt is empty; give at least one token.", param="prompt"
            )
        check_token_ids(request.prompt_ids, self.vocab_size, param="prompt")
        check_token_ids(request.stop_ids, self.vocab_size, param="stop_token_ids")
        request.params.check_vocabulary(self.vocab_size)
        if request.pictures:
            self.pictures.check(request)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise no_adapter(request.adapter, self.adapters)
        room = self.max_context - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens, and the context holds "
                f"{self.max_context} with the answer; shorten the prompt.",
                param="prompt",
            )
        self.check_memory(num_prompt)
        max_tokens = request.params.max_tokens or room
        return min(max_tokens, room, self.max_positions - num_prompt)

    def check_memory(self, num_prompt: int) -> None:
        """Raise InsufficientMemoryError where the prompt and one token need too many pages."""
        for group in self.groups:
            needed = min(-(-(num_prompt + 1) // self.page_size), group.max_pages)
            if needed > group.num_pages:
                raise InsufficientMemoryError(
                    f"The prompt has {num_prompt} tokens and needs {needed} pages of KV cache "
                    f"({human_bytes(needed * group.page_bytes)}), and there are only "
                    f"{group.num_pages}; shorten it or raise max_memory.",
                    param="prompt",
                )


def no_adapter(name: str, loaded: Seq[str]) -> InvalidRequestError:
    available = f"loaded: {', '.join(loaded)}" if loaded else "none is loaded"
    return InvalidRequestError(f"There is no adapter {shown(name)}; {available}.", param="adapter")
