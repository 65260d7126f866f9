"""/v1/sessions: prompts saved under names, and loaded again."""

from collections.abc import AsyncIterator
from typing import Annotated, BinaryIO, ClassVar

from msgspec import Meta

from ...session.saved import Client, SavedSession
from ..call import Call
from ..errors import HttpError
from ..http import File, Plain, RequestBody
from ..slots import ServedModel
from .sampling import MAX_SLOT

Slot = Annotated[int, Meta(ge=0, le=MAX_SLOT)]


class SaveRequest(RequestBody, kw_only=True):
    """The name that the prompt of a slot gets."""

    name: str
    model: str | None = None  # null: the default one, or the first
    id_slot: Slot = 0


class LoadSessionRequest(RequestBody, kw_only=True):
    """The slot whose prompt the session becomes."""

    may_be_empty: ClassVar[bool] = True

    id_slot: Slot = 0


async def list_sessions(call: Call) -> Plain:
    """The sessions that the key has saved."""
    sessions = await call.in_worker(call.sessions.all_of, call.owner)
    return {"object": "list", "data": [_card(session) for session in sessions]}


async def save_session(call: Call, body: SaveRequest) -> Plain:
    """Keep the last prompt of a slot, and its answer, under a name."""
    model = await _model(call, body.model)
    save, session = call.sessions.save_slot, model.session
    given = body.name, model.name, session, _client(call), body.id_slot
    return _card(await call.service.session_workers.run_for(call.tenant, save, *given))


async def load_session(call: Call, body: LoadSessionRequest) -> Plain:
    """Bring a session into memory; requests that begin like it compute only what follows."""
    session = await _find(call, call.path_params["id"])
    model = await _model(call, session.model)
    given = session, model.session, _client(call), body.id_slot
    await call.service.session_workers.run_for(call.tenant, call.sessions.load_slot, *given)
    return _card(session)


async def remove_session(call: Call) -> Plain:
    """Forget a session; its pages stay in the disk cache until others need the room."""
    name = call.path_params["id"]
    if not await call.in_worker(call.sessions.remove, name, call.owner):
        raise _missing(name)
    return {"name": name, "object": "session", "deleted": True}


async def export_session(call: Call) -> File:
    """The file of a session, which another server of the same model takes in."""
    session = await _find(call, call.path_params["id"])
    num_bytes, pieces = await call.in_worker(call.sessions.exported, session)

    async def read() -> AsyncIterator[bytes]:
        while piece := await call.in_worker(next, pieces, b""):
            yield piece

    return File(read(), num_bytes)


async def import_session(call: Call, file: BinaryIO) -> Plain:
    """Take in the file of a session, under its own name or that in the query."""
    if call.service.config.share_prefixes:
        call.require_admin()  # what the file holds would be part of others' answers
    model = await _model(call, call.query.get("model"))
    given = call.query.get("name"), model.name, model.session, _client(call)
    return _card(
        await call.service.session_workers.run_for(call.tenant, call.sessions.take_in, file, *given)
    )


def _client(call: Call) -> Client:
    share = 1.0 if call.key is None else call.service.config.keys.share_of(call.key)
    return Client(call.owner, call.namespace(), share)


async def _model(call: Call, name: str | None) -> ServedModel:
    model = await call.model(name)
    if "completion" not in model.session.capabilities:
        model.session.refuse("sessions")
    return model


async def _find(call: Call, name: str) -> SavedSession:
    session = await call.in_worker(call.sessions.find, name, call.owner)
    if session is None:
        raise _missing(name)
    return session


def _missing(name: str) -> HttpError:
    return HttpError("not_found", f"There is no session {name[:100]!r} of this key.")


def _card(saved: SavedSession) -> Plain:
    return {
        "name": saved.name,
        "object": "session",
        "model": saved.model,
        "created": saved.created_s,
        "tokens": len(saved.prompt.token_ids),
        "bytes": saved.num_bytes,
    }
