"""The ASGI app: every endpoint behind the guard. Knows neither sockets nor APIs by name."""

from collections.abc import Iterable

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from .apis import ENDPOINTS
from .calls.endpoint import Endpoint, Served
from .calls.service import Service
from .errors import NoSuchPathError
from .http.guard import Guard
from .ops.openapi import documentation


def build_app(service: Service, endpoints: Iterable[Endpoint] = ENDPOINTS) -> ASGIApp:
    """The app of a service."""
    listed = tuple(endpoints)
    listed += documentation(listed)
    routes = [
        Route(e.path, Served(e, service), methods=[e.method], name=f"{e.method} {e.path}")
        for e in listed
    ]
    router = Router(routes, redirect_slashes=False, default=_nothing_here)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # lets starlette raise for a wrong method instead of answering
        await router(scope, receive, send)

    return Guard(routed, service.config, listed)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise NoSuchPathError("Nothing is served at this path; /docs lists what is.")
