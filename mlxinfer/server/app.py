"""The ASGI app: every endpoint of every API, behind the guard."""

from collections.abc import Iterable, Sequence

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from .anthropic import messages
from .anthropic import models as anthropic_models
from .calls.endpoint import Endpoint, Served
from .calls.service import Service
from .errors import NoSuchPathError
from .http.guard import Guard
from .ollama import chat as ollama_chat
from .ollama import embed as ollama_embed
from .ollama import models as ollama_models
from .openai import (
    adapters,
    chat,
    completions,
    embeddings,
    infill,
    models,
    rerank,
    responses,
    stored_responses,
    tokens,
)
from .ops import admin, health, loads, metrics
from .ops.openapi import documentation
from .page import files, state

ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    *completions.ENDPOINTS,
    *infill.ENDPOINTS,
    *models.ENDPOINTS,
    *adapters.ENDPOINTS,
    *responses.ENDPOINTS,
    *stored_responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *anthropic_models.ENDPOINTS,
    *tokens.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *rerank.ENDPOINTS,
    *ollama_chat.ENDPOINTS,
    *ollama_models.ENDPOINTS,
    *ollama_embed.ENDPOINTS,
    *health.ENDPOINTS,
    *metrics.ENDPOINTS,
    *loads.ENDPOINTS,
    *admin.ENDPOINTS,
    *state.ENDPOINTS,
)


def build_app(service: Service, endpoints: Iterable[Endpoint] = ENDPOINTS) -> ASGIApp:
    """The ASGI app of a service."""
    listed = tuple(endpoints)
    listed += (*documentation(listed), *files.ENDPOINTS)
    places: dict[tuple[str, str], list[Served]] = {}
    for endpoint in listed:
        places.setdefault((endpoint.method, endpoint.path), []).append(Served(endpoint, service))
    routes = [
        Route(path, HeaderRouter(served), methods=[method], name=f"{method} {path}")
        for (method, path), served in places.items()
    ]
    router = Router(routes, redirect_slashes=False, default=_nothing_here)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # lets starlette raise for a wrong method instead of answering
        await router(scope, receive, send)

    return Guard(routed, service.config, listed)


class HeaderRouter:
    """Serves one path: by the endpoint of a header in the request, else by the plain one."""

    def __init__(self, served: Sequence[Served]) -> None:
        (self._plain,) = [each for each in served if each.endpoint.if_header is None]
        self._named = [each for each in served if each.endpoint.if_header is not None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        sent = {name for name, _ in scope["headers"]}
        found = [each for each in self._named if each.endpoint.if_header in sent]
        await (found[0] if found else self._plain)(scope, receive, send)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise NoSuchPathError("Nothing is served at this path; /docs lists what is.")
