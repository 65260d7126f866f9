"""/api/v1/models of LM Studio: models are listed, loaded and unloaded.

Source of the forms: 1_developer/2_rest (lmstudio-ai/docs).
"""

import time

from ...errors import InvalidRequestError
from ..call import Call
from ..http import Plain, RequestBody
from ..slots import ModelSlot


class LoadInstanceRequest(RequestBody, kw_only=True):
    """A model, and the context that the client will use."""

    model: str
    context_length: int | None = None


class UnloadInstanceRequest(RequestBody, kw_only=True):
    """A loaded model."""

    instance_id: str


async def list_models(call: Call) -> Plain:
    """All models, loaded or not."""
    return {"models": [_card(slot) for slot in call.service.models.slots()]}


async def load(call: Call, body: LoadInstanceRequest) -> Plain:
    """Load a model; refuse a context that is longer than it has."""
    began_s = time.monotonic()
    call.refuse_while_draining()
    await call.service.models.load(body.model)
    slot = call.service.models.find(body.model)
    if body.context_length is not None and body.context_length > (slot.max_context or 0):
        raise InvalidRequestError.of(
            "context_length",
            f"is {body.context_length}; {slot.entry.name} is loaded with {slot.max_context}.",
        )
    return {
        "type": _kind(slot),
        "instance_id": slot.entry.name,
        "status": "loaded",
        "load_time_seconds": time.monotonic() - began_s,
    }


async def unload(call: Call, body: UnloadInstanceRequest) -> Plain:
    """Unload a model that no request uses."""
    await call.service.models.unload(body.instance_id, 0.0)
    return {"instance_id": body.instance_id}


def _kind(slot: ModelSlot) -> str:
    """A model is taken for one that generates until it was loaded."""
    return "embedding" if (slot.capabilities or {}).get("embeddings") else "llm"


def _card(slot: ModelSlot) -> Plain:
    """A model; context length and abilities are null before its first load."""
    info = None if slot.served is None else slot.served.session.info
    able, name = slot.capabilities, slot.entry.name
    quantization = None if info is None else info.quantization
    instance = {"id": name, "config": {"context_length": slot.max_context}}
    return {
        "type": _kind(slot),
        "publisher": slot.entry.source.partition("/")[0] if "/" in name else "",
        "key": name,
        "display_name": name,
        "architecture": None if info is None else info.architecture,
        "quantization": quantization and {"name": quantization, "bits_per_weight": None},
        "size_bytes": slot.weights_bytes,
        "params_string": None,
        "loaded_instances": [instance] if slot.loaded else [],
        "max_context_length": slot.max_context,
        "format": "mlx",
        "capabilities": able and {"vision": able["vision"], "trained_for_tool_use": able["tools"]},
        "description": None,
    }
