"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters of a model, as vLLM has them."""

from pathlib import Path

import msgspec

from ...errors import InvalidRequestError, MlxinferError, shown
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """A folder with an adapter, and the name that it gets."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None  # null: the default one, or the first
    load_inplace: bool = False  # in place of the adapter that has the name, if one has


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """An adapter by its name."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's number; not needed
    base_model_name: str | None = None  # null: whichever has it


class AdapterAnswer(msgspec.Struct, kw_only=True):
    """What was done."""

    message: str


async def load(call: Call, body: LoadAdapterRequest) -> Reply:
    """Load an adapter; requests run on meanwhile."""
    call.refuse_while_draining()
    models = call.service.models
    folder = _allowed(body.lora_path, call.service.config.adapter_folders)
    slot = models.find(body.base_model_name)
    model, before = slot.entry.name, slot.adapters.get(body.lora_name)
    if body.load_inplace and before is not None:
        await models.unload_adapter(model, body.lora_name)
    try:
        await models.load_adapter(model, body.lora_name, folder)
    except MlxinferError as error:
        error.param = "lora_name" if error.param == "name" else error.param
        if body.load_inplace and before is not None:  # what was to be replaced stays
            await models.load_adapter(model, body.lora_name, before)
        raise
    name = f"{model}:{body.lora_name}"
    return json_body(AdapterAnswer(message=f"The adapter is there: model {name!r}."))


async def unload(call: Call, body: UnloadAdapterRequest) -> Reply:
    """Let no new request name an adapter; running ones end with it."""
    await call.service.models.unload_adapter(body.base_model_name, body.lora_name)
    return json_body(AdapterAnswer(message=f"The adapter {body.lora_name!r} is unloaded."))


def _allowed(path: str, folders: tuple[str, ...]) -> Path:
    """The folder of an adapter, links followed; raises where clients may not name it."""
    if not folders:
        raise InvalidRequestError(
            "This server loads adapters at its start only (--adapter NAME=PATH); --adapter-dir "
            "FOLDER lets requests load those in a folder.",
            param="lora_path",
        )
    if "\0" in path:
        raise InvalidRequestError(f"{shown(path)} is no path.", param="lora_path")
    roots = [Path(folder).expanduser().resolve() for folder in folders]
    for root in roots:
        found = (root / path).resolve()  # an absolute path stays what it is
        if found.is_relative_to(root) and found != root:
            return found
    raise InvalidRequestError(
        f"{shown(path)} is not in a folder of --adapter-dir, from which alone adapters are loaded.",
        param="lora_path",
    )


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=load,
        summary="Load an adapter (LoRA, rsLoRA or DoRA) of a model.",
        body=LoadAdapterRequest,
        answer=AdapterAnswer,
    ),
    Endpoint(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=unload,
        summary="Unload an adapter.",
        body=UnloadAdapterRequest,
        answer=AdapterAnswer,
    ),
)
