"""Every API of the server: the one list that a new file is added to."""

from . import (
    admin,
    anthropic_messages,
    health,
    metrics,
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
    *health.ENDPOINTS,
    *metrics.ENDPOINTS,
    *admin.ENDPOINTS,
)
