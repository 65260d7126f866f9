"""GET /api/tags, /api/ps, /api/version; POST /api/show, /api/pull."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...errors import InvalidRequestError
from ..background import in_background
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..errors import ForbiddenError
from ..http.replies import Events, Reply, json_body
from ..registry.slots import Slot, State
from .types import NDJSON, OLLAMA, NamedModel, line

API_VERSION = "0.12.6"  # of Ollama: these paths follow its API; clients check for the oldest
LATEST = ":latest"  # a tag that clients add to names without one
POLL_S = 0.2  # between two lines of progress


class Details(msgspec.Struct, kw_only=True):
    """What a model is, as far as it is known."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ModelTag(msgspec.Struct, kw_only=True):
    """A model that requests may name."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes of weights
    digest: str  # of the name: the files are not hashed
    details: Details


class RunningTag(ModelTag, kw_only=True):
    """A loaded model."""

    size_vram: int  # weights and KV cache
    expires_at: str
    context_length: int


class Tags(msgspec.Struct, kw_only=True):
    """Models."""

    models: list[Any]


def slot_of(call: Call, name: str) -> Slot:
    """The model of a name, with Ollama's tag or without; raises ModelNotFoundError."""
    models = call.service.models
    plain = name.removesuffix(LATEST)
    return models.find(plain if name not in models.names() else name)


async def tags(call: Call, _: None) -> Reply:
    """The models that requests may name."""
    return json_body(Tags(models=[_tag(slot) for slot in call.service.models.slots()]))


async def ps(call: Call, _: None) -> Reply:
    """The models that are loaded."""
    models = call.service.models
    found = []
    for slot in models.slots():
        if slot.state is not State.LOADED:
            continue
        plain = msgspec.structs.asdict(_tag(slot))
        left_s = models.ttl_left_s(slot)
        expires = datetime.fromtimestamp(call.created_s + (left_s or 0), UTC)
        if left_s is None:  # it stays
            expires = expires.replace(year=expires.year + 100, day=1)
        found.append(
            RunningTag(
                **plain,
                size_vram=slot.held_bytes,
                expires_at=_written(expires),
                context_length=slot.max_context or 0,
            )
        )
    return json_body(Tags(models=found))


async def version(call: Call, _: None) -> Reply:
    """The version of Ollama's API."""
    return json_body({"version": API_VERSION})


async def show_details(call: Call, body: NamedModel) -> Reply:
    """What a model is; loads it."""
    model = await call.model(slot_of(call, body.called).entry.name)
    slot, info = slot_of(call, body.called), model.info
    able = model.capabilities
    named = {
        "completion": "completion",
        "tools": "tools",
        "thinking": "reasoning",
        "embedding": "embeddings",
    }
    template = model.tokenizer.template
    architecture, dim = info.architecture, info.embedding_dim
    return json_body(
        {
            "modelfile": "",
            "parameters": "",
            "template": "" if template is None else template.source_for(None),
            "details": _details(slot),
            "model_info": {
                "general.architecture": architecture,
                f"{architecture}.context_length": model.max_context,
                f"{architecture}.block_count": info.num_layers,
                f"{architecture}.vocab_size": info.vocab_size,
                **({} if dim is None else {f"{architecture}.embedding_length": dim}),
            },
            "capabilities": [
                *(name for name, key in named.items() if able[key]),
                *(["insert"] if able["infill"] else []),
            ],
            "modified_at": _tag(slot).modified_at,
        }
    )


async def pull(call: Call, body: NamedModel) -> Reply:
    """Download a model from the Hugging Face hub and serve it, where the server allows that."""
    service = call.service
    if service.fetch is None:
        raise ForbiddenError("Downloads are off here; the server is started with --allow-pull.")
    name = body.called
    if not name:
        raise InvalidRequestError("model is missing, and is required.", param="model")
    lines = _pulling(call, name)
    if body.stream is not False:
        return Events(lines, media_type=NDJSON)
    last = b""
    async for text in lines:
        last = text
    return json_body(msgspec.json.decode(last))


async def _pulling(call: Call, name: str) -> AsyncIterator[bytes]:
    """Yield lines of progress until the model is served; a client that leaves stops watching."""
    fetch = call.service.fetch
    assert fetch is not None
    seen = [(0, 0)]
    yield line({"status": "pulling manifest"})
    work = in_background(lambda: fetch(name, seen.append), "mlxinfer-pull")
    pending = asyncio.wrap_future(work)
    digest = f"sha256:{_digest(name)}"
    while not pending.done():
        await asyncio.wait({pending}, timeout=POLL_S)
        done, total = seen[-1]
        state = {"status": f"pulling {digest[7:19]}", "digest": digest}
        yield line({**state, "total": total, "completed": done})
    entry = await pending
    if name not in call.service.models.names():
        call.service.add_model(entry)
    yield line({"status": "success"})


def _tag(slot: Slot) -> ModelTag:
    entry = slot.entry
    name = entry.name if ":" in entry.name else f"{entry.name}{LATEST}"
    return ModelTag(
        name=name,
        model=name,
        modified_at=_written(datetime.fromtimestamp(entry.created_s, UTC)),
        size=slot.weights_bytes,
        digest=_digest(entry.name),
        details=_details(slot),
    )


def _details(slot: Slot) -> Details:
    """What is known of a model: more once it is loaded."""
    if slot.served is None:
        return Details()
    info = slot.served.info
    family = info.architecture
    return Details(family=family, families=[family], quantization_level=info.quantization or "")


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _written(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _endpoint(method: str, path: str, handler: Any, summary: str, body: Any = None) -> Endpoint:
    return Endpoint(
        method=method,
        path=path,
        handler=handler,
        summary=f"{summary} (Ollama's API).",
        body=body,
        style=OLLAMA,
    )


ENDPOINTS = (
    _endpoint("GET", "/api/tags", tags, "The models that requests may name"),
    _endpoint("GET", "/api/ps", ps, "The models that are loaded"),
    _endpoint("GET", "/api/version", version, "The version of the API"),
    _endpoint("POST", "/api/show", show_details, "What a model is", NamedModel),
    _endpoint("POST", "/api/pull", pull, "Download a model, if that is allowed", NamedModel),
)
