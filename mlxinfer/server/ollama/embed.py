"""POST /api/embed and /api/embeddings of Ollama's API. Source: docs/api.md of Ollama."""

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...pooling.request import TokenRow
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body
from ..registry.served import ServedModel
from .models import slot_of
from .types import OLLAMA

MAX_INPUTS = 2048


class EmbedAsk(msgspec.Struct, kw_only=True):
    """Texts; one that is too long is cut unless `truncate` is false."""

    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] = ""
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    options: Any = None  # of the machine and of sampling: nothing here depends on them
    keep_alive: Any = None  # the server's own times hold


class Embedded(msgspec.Struct, kw_only=True):
    """Vectors of length 1. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedAsk(msgspec.Struct, kw_only=True):
    """One text, at the older path."""

    model: str
    prompt: str = ""
    options: Any = None
    keep_alive: Any = None


class OldEmbedded(msgspec.Struct, kw_only=True):
    """Its vector."""

    embedding: list[float]


async def embed_texts(call: Call, body: EmbedAsk) -> Reply:
    """The vectors of texts; without texts the model is loaded."""
    began_s = time.monotonic()
    model = await call.model(slot_of(call, body.model).entry.name)
    loaded_s = time.monotonic()
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    rows, vectors = await _vectors(call, model, texts, body.truncate is not False, body.dimensions)
    return json_body(
        Embedded(
            model=body.model,
            embeddings=vectors,
            total_duration=int((time.monotonic() - began_s) * 1e9),
            load_duration=int((loaded_s - began_s) * 1e9),
            prompt_eval_count=sum(len(row.ids) for row in rows),
        )
    )


async def embed_text(call: Call, body: OldEmbedAsk) -> Reply:
    """The vector of one text, as the model gives it."""
    model = await call.model(slot_of(call, body.model).entry.name)
    texts = [body.prompt] if body.prompt else []
    _, vectors = await _vectors(call, model, texts, True, None, normalize=None)
    return json_body(OldEmbedded(embedding=vectors[0] if vectors else []))


async def _vectors(
    call: Call,
    model: ServedModel,
    texts: list[str],
    truncate: bool,
    dimensions: int | None,
    *,
    normalize: bool | None = True,
) -> tuple[list[TokenRow], list[list[float]]]:
    """The rows that were read, and their vectors."""
    session = model.pooler
    session.require_vectors()
    session.check_dimensions(dimensions)
    if not texts:
        return [], []

    def read() -> list[TokenRow]:
        return session.rows.texts(texts, prompt=session.prompt(None, None), truncate=truncate)

    rows = await call.in_worker(read)
    vectors = await call.pool(model, rows)
    finished = await call.in_worker(session.finished_vectors, vectors, dimensions, normalize)
    return rows, finished.tolist()


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/embed",
        handler=embed_texts,
        summary="The vectors of texts (Ollama's API).",
        body=EmbedAsk,
        answer=Embedded,
        style=OLLAMA,
    ),
    Endpoint(
        method="POST",
        path="/api/embeddings",
        handler=embed_text,
        summary="The vector of a text (Ollama's API).",
        body=OldEmbedAsk,
        answer=OldEmbedded,
        style=OLLAMA,
    ),
)
