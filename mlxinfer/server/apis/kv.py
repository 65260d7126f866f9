"""POST /v1/kv/held, /v1/kv/entries, /v1/kv/compute: pages of the prefix cache for other servers.

A page is named by the key of its entry on the disk, see cache/disk/entry.py. The key follows from
the tokens, the model and its format. Nothing can be learned from the key alone.
"""

from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

from msgspec import Meta

from ...core import SamplingParams
from ...session.inputs import TextInput
from ..call import Call
from ..errors import HttpError
from ..http import Body, Plain, RequestBody
from ..slots import ServedModel

KEY_DIGITS = 40
MAX_KEYS = 1 << 17
BYTES = b"application/octet-stream"

P = ParamSpec("P")
T = TypeVar("T")
Namespace = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]


class KeysRequest(RequestBody, kw_only=True):
    """Pages by the keys of their entries."""

    namespace: Namespace
    keys: Annotated[str, Meta(pattern="^([0-9a-f]{40})*$", max_length=KEY_DIGITS * MAX_KEYS)]

    @property
    def listed(self) -> list[bytes]:
        digits = range(0, len(self.keys), KEY_DIGITS)
        return [bytes.fromhex(self.keys[i : i + KEY_DIGITS]) for i in digits]


class ComputeRequest(RequestBody, kw_only=True):
    """A prompt whose pages will be asked for."""

    namespace: Namespace
    token_ids: Annotated[list[int], Meta(max_length=1 << 24)]
    cache_salt: str | None = None


async def held(call: Call, body: KeysRequest) -> Body:
    """For each key "1" where this server has its entry, else "0"."""
    model = await _model(call, body.namespace)
    return Body(await _in_thread(call, model.session.pages.held, body.listed), media_type=BYTES)


async def entries(call: Call, body: KeysRequest) -> Body:
    """The entries of keys one after another, up to the first that is not there."""
    model = await _model(call, body.namespace)
    return Body(await _in_thread(call, model.session.pages.entries, body.listed), media_type=BYTES)


async def compute(call: Call, body: ComputeRequest) -> Plain:
    """Compute a prompt, and answer once its pages are there."""
    model = await _model(call, body.namespace)
    prompt = TextInput(
        prompt=body.token_ids,
        params=SamplingParams(max_tokens=1, temperature=0),
        cache_salt=body.cache_salt,
        owner=call.owner,
        from_peer=True,
    )
    answers = await call.in_worker(model.session.start, prompt)
    call.begin(answers)
    await answers.aresults()
    return {}


async def _model(call: Call, namespace: str) -> ServedModel:
    """The loaded model with pages of this namespace; none is loaded for it."""
    service = call.service
    if not service.config.allow_peers:
        raise HttpError(
            "not_found",
            "This server gives no pages; `allow-peers = true` in its config file lets it.",
        )
    for model in service.models.running():
        if "completion" in model.session.capabilities:
            name = await _in_thread(call, model.session.pages.namespace)
            if name is not None and name.hex() == namespace:
                return await call.model(model.name)
    raise HttpError(
        "not_found",
        "No model that is loaded here has such pages: weights, kv_bits, and the versions of "
        "mlxinfer and MLX must be the same.",
    )


async def _in_thread(call: Call, function: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
    return await call.service.page_workers.run_for(call.tenant, function, *args, **kw)
