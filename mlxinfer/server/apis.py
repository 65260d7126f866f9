"""Every API of the server: the one list that a new file is added to."""

from . import openai_chat, openai_completions, openai_models, tokens
from .endpoint import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (
    *openai_chat.ENDPOINTS,
    *openai_completions.ENDPOINTS,
    *openai_models.ENDPOINTS,
    *tokens.ENDPOINTS,
)
