"""Every API of the server: the one list that a new file is added to."""

from .anthropic import messages
from .anthropic import models as anthropic_models
from .calls.endpoint import Endpoint
from .openai import chat, completions, models, responses, tokens
from .ops import admin, health, metrics

ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    *completions.ENDPOINTS,
    *models.ENDPOINTS,
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *anthropic_models.ENDPOINTS,
    *tokens.ENDPOINTS,
    *health.ENDPOINTS,
    *metrics.ENDPOINTS,
    *admin.ENDPOINTS,
)
