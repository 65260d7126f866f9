"""Whether a request can ever run, and how long its answer may be. Knows sizes; queues nothing."""

from ..cache.kv import KVCache
from ..config import EngineConfig
from ..core import Request, check_token_ids
from ..errors import ContextLengthError, InsufficientMemoryError, InvalidRequestError
from ..memory import human_bytes
from .kv_manager import KVManager


def check_request(
    request: Request, vocab_size: int, config: EngineConfig, cache: KVCache, kv_manager: KVManager
) -> int:
    """How many tokens the answer of a request may have at most.

    Raises:
        InvalidRequestError, ContextLengthError, InsufficientMemoryError: it can never run.
    """
    num_prompt = len(request.prompt_ids)
    if not num_prompt:
        raise InvalidRequestError("The prompt is empty; give at least one token.", param="prompt")
    check_token_ids(request.prompt_ids, vocab_size, param="prompt")
    check_token_ids(request.stop_ids, vocab_size, param="stop_token_ids")
    request.params.check_vocabulary(vocab_size)
    room = config.max_context - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens, and the context holds "
            f"{config.max_context} with the answer; shorten the prompt.",
            param="prompt",
        )
    _check_memory(num_prompt, cache, kv_manager)
    max_tokens = request.params.max_tokens or room
    return min(max_tokens, room, cache.max_tokens - num_prompt)


def _check_memory(num_prompt: int, cache: KVCache, kv_manager: KVManager) -> None:
    for index, group in enumerate(cache.groups):
        needed = kv_manager.pages_needed(index, num_prompt + 1)
        if needed > group.allocator.num_pages:
            raise InsufficientMemoryError(
                f"The prompt has {num_prompt} tokens and needs {needed} pages of KV cache "
                f"({human_bytes(needed * group.page_bytes)}), and there are only "
                f"{group.allocator.num_pages}; shorten it or raise max_memory.",
                param="prompt",
            )
