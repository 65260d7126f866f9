"""Every API of the server: the one list that a new file is added to."""

from . import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    tokens,
)
from .endpoint import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (
    *openai_chat.ENDPOINTS,
    *openai_completions.ENDPOINTS,
    *openai_models.ENDPOINTS,
    *openai_responses.ENDPOINTS,
    *anthropic_messages.ENDPOINTS,
    *tokens.ENDPOINTS,
)
