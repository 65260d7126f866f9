"""GET /health and /ready: whether the process lives, and whether its models make progress.

Neither needs a key, and neither reveals models or requests.
"""

from typing import Literal

import msgspec

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body
from ..watch.readiness import Health

RETRY_S = {Health.LOADING: 5, Health.DRAINING: 30, Health.STUCK: 30, Health.FAILING: 10}


class Alive(msgspec.Struct, kw_only=True):
    """The process and its event loop answer."""

    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct, kw_only=True):
    """Whether requests would be answered."""

    status: str  # ready; with status 503: loading, draining, stuck or failing


async def health(call: Call, _: None) -> Reply:
    """Answer: the process and its event loop work."""
    return json_body(Alive())


async def ready(call: Call, _: None) -> Reply:
    """Check that every loaded model generates a token or finishes steps."""
    found = Health.DRAINING if call.service.draining else await call.service.readiness.check()
    reply = json_body(Ready(status=found), 200 if found is Health.READY else 503)
    if found is not Health.READY:
        reply.headers.append((b"retry-after", str(RETRY_S[found]).encode()))
    return reply


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/health",
        handler=health,
        summary="The server lives.",
        answer=Alive,
        needs_key=False,
    ),
    Endpoint(
        method="GET",
        path="/ready",
        handler=ready,
        summary="The models make tokens; 503 while they are loaded, stuck, or about to end.",
        answer=Ready,
        needs_key=False,
    ),
)
