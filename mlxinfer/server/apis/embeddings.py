"""POST /v1/embeddings, /v1/rerank and /v1/score: vectors of texts, and how well texts go together.

Forms of OpenAI, Jina, Cohere and vLLM.
"""

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError
from ...outputs import ranked
from ...session.inputs import EmbedInput, ScoreInput
from ...session.pooling_session import PoolingSession
from ..call import Call
from ..http import SharingBody
from ..slots import ServedModel
from .tools import Prompts, texts_of

MAX_INPUTS = 2048  # of one request: OpenAI's bound
# Words of Cohere, Voyage and NVIDIA for what a text is, and the model's prompts that they mean.
INPUT_TYPES = {
    "query": ("query", "search_query"),
    "search_query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
    "passage": ("passage", "document", "search_document"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}
Truncate = Annotated[int, Meta(ge=-1)]  # tokens; -1: what the model reads


class PoolingBody(SharingBody, kw_only=True):
    """Fields of all requests here."""

    model: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncate: bool | None = None
    user: str | None = None

    @property
    def cut(self) -> int | bool:
        """How texts that are too long are cut, as PoolingSession.embed takes it."""
        tokens = self.truncate_prompt_tokens
        if tokens is None:
            return bool(self.truncate)
        if tokens == 0:
            raise InvalidRequestError.of(
                "truncate_prompt_tokens", "is 0; expected a number of tokens, or -1."
            )
        return True if tokens == -1 else tokens


class EmbeddingRequest(PoolingBody, kw_only=True):
    """Texts or token ids; fields behind `dimensions` are TEI's and Cohere's."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
    }

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None  # which of the model's own prompts stands before the texts
    prompt: str | None = None  # a text that stands there instead
    input_type: str | None = None  # as prompt_name, by other servers' words


def pooling_usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def embed(call: Call, body: EmbeddingRequest) -> dict[str, Any]:
    """The vectors of texts."""
    model = await call.model(body.model)
    given = EmbedInput(
        texts=list(texts_of(body.input, "input", MAX_INPUTS).values()),
        prompt_name=_prompt_name(model.pooler, body),
        prompt=body.prompt,
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate=body.cut,
    )
    num_tokens, vectors = await call.pool(model, lambda: model.pooler.read_texts(given))

    def answer() -> dict[str, Any]:
        rows: list[Any] = vectors.tolist()
        if body.encoding_format == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ]
        usage = pooling_usage(num_tokens)
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    return await call.in_worker(answer)


def _prompt_name(session: PoolingSession, body: EmbeddingRequest) -> str | None:
    if body.prompt_name is not None or body.input_type is None:
        return body.prompt_name
    if body.input_type not in INPUT_TYPES:
        raise InvalidRequestError.of(
            "input_type", f"is {body.input_type[:40]!r}; expected one of {', '.join(INPUT_TYPES)}."
        )
    names = INPUT_TYPES[body.input_type]
    return next((name for name in names if name in session.pooling.prompts), None)


# -- pairs of texts ----------------------------------------------------------------------------

MAX_PAIRS = 4096  # of one request


class TextDocument(msgspec.Struct, kw_only=True):
    """A document in an object, as Jina and Cohere take it."""

    text: str


Texts = str | list[str | TextDocument]


class RerankRequest(PoolingBody, kw_only=True):
    """A query and documents; TEI calls the documents `texts`."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "max_chunks_per_doc": (1,),
        "rank_fields": (["text"],),
    }
    aliases: ClassVar[Mapping[str, str]] = {"texts": "documents"}

    query: str
    documents: list[str | TextDocument] | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None  # default true, as vLLM has it
    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None


SIDES = ("text_1", "text_2")


class ScoreRequest(PoolingBody, kw_only=True):
    """Texts of two sides: one goes with each of the other's. Names of vLLM, older and newer."""

    aliases: ClassVar[Mapping[str, str]] = {
        "queries": "text_1",
        "data_1": "text_1",
        "documents": "text_2",
        "data_2": "text_2",
    }

    text_1: Texts | None = None
    text_2: Texts | None = None
    instruction: str | None = None


async def rerank(call: Call, body: RerankRequest) -> dict[str, Any]:
    """Documents by how well they go with a query."""
    if body.documents is None:
        raise InvalidRequestError.of("documents", "is missing, and is required.")
    model = await call.model(body.model)
    documents = _texts(body.documents)
    if not 0 < len(documents) <= MAX_PAIRS:
        raise InvalidRequestError(
            f"There are {len(documents)} documents; expected 1 to {MAX_PAIRS}.", param="documents"
        )
    texts, most = documents, body.max_tokens_per_doc
    if most is not None:
        texts = await call.in_worker(_shortened, model, documents, most)
    given = ScoreInput(
        first=[body.query], second=texts, instruction=body.instruction, truncate=body.cut
    )
    num_tokens, scores = await call.pool(model, lambda: model.pooler.read_pairs(given))
    shows = body.return_documents is not False
    usage = pooling_usage(num_tokens)
    return {
        "id": f"rerank-{call.id}",
        "object": "list",
        "model": model.name,
        "results": [
            {
                "index": document.index,
                "relevance_score": document.score,
                **({"document": {"text": document.document}} if shows else {}),
            }
            for document in ranked(documents, scores, body.top_n or None)
        ],
        "usage": usage,
        "meta": {  # where Cohere's clients look for usage
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": num_tokens},
        },
    }


async def score(call: Call, body: ScoreRequest) -> dict[str, Any]:
    """How well texts go together, pair by pair."""
    model = await call.model(body.model)
    one, other = (_side(body, name) for name in SIDES)
    given = ScoreInput(
        first=one, second=other, instruction=body.instruction, truncate=body.cut, names=SIDES
    )
    count = max(len(one), len(other))
    if count > MAX_PAIRS:
        raise InvalidRequestError(
            f"There are {count} pairs; expected at most {MAX_PAIRS}.", param="text_1"
        )
    num_tokens, scores = await call.pool(model, lambda: model.pooler.read_pairs(given))
    return {
        "id": f"score-{call.id}",
        "object": "list",
        "created": call.created_s,
        "model": model.name,
        "data": [
            {"index": i, "object": "score", "score": float(value)} for i, value in enumerate(scores)
        ],
        "usage": pooling_usage(num_tokens),
    }


def _shortened(model: ServedModel, documents: list[str], most: int) -> list[str]:
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in documents]
    return [
        text if len(token_ids) <= most else tokenizer.decode(token_ids[:most])
        for text, token_ids in zip(documents, ids, strict=True)
    ]


def _side(body: ScoreRequest, name: str) -> list[str]:
    given: Texts | None = getattr(body, name)
    if given is None:
        raise InvalidRequestError.of(name, "is missing, and is required.")
    return [given] if isinstance(given, str) else _texts(given)


def _texts(given: list[str | TextDocument]) -> list[str]:
    return [item if isinstance(item, str) else item.text for item in given]
