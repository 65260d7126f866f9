"""GET /v1/loads and /server_info: what a router in front of several servers polls.

Source of the forms: smg, the gateway of SGLang (github.com/lightseekorg/smg,
`crates/protocols/src/worker.rs`: WorkerLoadResponse, SchedulerLoadSnapshot).
"""

from datetime import UTC, datetime

import msgspec

from ... import __version__
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body
from .metrics import ServerMetrics, snapshot


class Load(msgspec.Struct, kw_only=True):
    """What all models of this server do together; a server is one rank."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int  # of running requests, in the KV cache
    max_total_num_tokens: int  # that the KV cache holds
    token_usage: float  # of these two
    cache_hit_rate: float  # of all prompt tokens since the start


class Loads(msgspec.Struct, kw_only=True):
    """The load at a moment."""

    timestamp: str  # ISO 8601
    dp_rank_count: int = 1
    loads: list[Load]


class ServerInfo(msgspec.Struct, kw_only=True):
    """What a router wants to know of a server once."""

    version: str
    served_model_name: str  # of the first model
    dp_size: int = 1


async def loads(call: Call, _: None) -> Reply:
    """The load now."""
    now = datetime.now(UTC).isoformat()
    return json_body(Loads(timestamp=now, loads=[_load(await snapshot(call.service))]))


async def server_info(call: Call, _: None) -> Reply:
    """The version and the first model's name."""
    names = [slot.entry.name for slot in call.service.models.slots()]
    return json_body(ServerInfo(version=__version__, served_model_name=names[0] if names else ""))


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/loads",
        handler=loads,
        summary="Requests and KV cache now, as routers poll it.",
        answer=Loads,
    ),
    Endpoint(
        method="GET",
        path="/server_info",
        handler=server_info,
        summary="The version and the first model, as routers ask for it.",
        answer=ServerInfo,
    ),
)


def _load(metrics: ServerMetrics) -> Load:
    running = waiting = used = most = 0
    for name, each in metrics.request_metrics.items():
        stats = metrics.engine_stats.get(name, {})
        running += stats.get("running", each.num_running)
        waiting += stats.get("waiting", each.num_waiting)
        for group in stats.get("groups", ())[:1]:  # the one that holds the longest contexts
            used += group["pages_held"] * stats["page_size"]
            most += group["pages"] * stats["page_size"]
    counted = metrics.request_metrics.values()
    prompts = sum(each.prompt_tokens for each in counted)
    return Load(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used,
        max_total_num_tokens=most,
        token_usage=used / most if most else 0.0,
        cache_hit_rate=sum(e.cached_tokens for e in counted) / prompts if prompts else 0.0,
    )
