"""POST /v1/rerank and /v1/score: how well texts go together, in the forms of Jina, Cohere, vLLM."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError
from ...outputs import ranked
from ...session.inputs import ScoreInput
from ..call import Call
from ..http import RequestBody
from ..served import ServedModel
from .embeddings import Truncate, pooling_usage, truncation

MAX_PAIRS = 4096  # of one request


class TextDocument(msgspec.Struct, kw_only=True):
    """A document in an object, as Jina and Cohere take it."""

    text: str


Texts = str | list[str | TextDocument]


class RerankRequest(RequestBody, kw_only=True):
    """A query and documents; TEI calls the documents `texts`."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "max_chunks_per_doc": (1,),
        "rank_fields": (["text"],),
    }
    aliases: ClassVar[Mapping[str, str]] = {"texts": "documents"}

    model: str | None = None
    query: str
    documents: list[str | TextDocument] | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None  # default true, as vLLM has it
    instruction: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncate: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class ScoreRequest(RequestBody, kw_only=True):
    """Texts of two sides: one goes with each of the other's. Names of vLLM, older and newer."""

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncate: bool | None = None
    user: str | None = None


async def rerank(call: Call, body: RerankRequest) -> dict[str, Any]:
    """Documents by how well they go with a query."""
    if body.documents is None:
        raise InvalidRequestError("documents is missing, and is required.", param="documents")
    model = await call.model(body.model)
    documents = _texts(body.documents)
    if not 0 < len(documents) <= MAX_PAIRS:
        raise InvalidRequestError(
            f"There are {len(documents)} documents; expected 1 to {MAX_PAIRS}.", param="documents"
        )
    cut = truncation(body.truncate_prompt_tokens, body.truncate)
    texts, most = documents, body.max_tokens_per_doc
    if most is not None:
        texts = await call.in_worker(_shortened, model, documents, most)
    given = ScoreInput(first=[body.query], second=texts, instruction=body.instruction, truncate=cut)
    num_tokens, scores = await call.pool(model, lambda: model.pooler.read_pairs(given))
    shows = body.return_documents is not False
    usage = pooling_usage(num_tokens)
    return {
        "id": f"rerank-{call.id}",
        "object": "list",
        "model": model.name,
        "results": [
            {
                "index": each.index,
                "relevance_score": each.score,
                **({"document": {"text": each.document}} if shows else {}),
            }
            for each in ranked(documents, scores, body.top_n or None)
        ],
        "usage": usage,
        "meta": {  # where Cohere's clients look for usage
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": num_tokens},
        },
    }


async def score(call: Call, body: ScoreRequest) -> dict[str, Any]:
    """The scores of pairs of texts."""
    model = await call.model(body.model)
    one, other = _sides(body)
    given = ScoreInput(
        first=one,
        second=other,
        instruction=body.instruction,
        truncate=truncation(body.truncate_prompt_tokens, body.truncate),
        names=("text_1", "text_2"),
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
            {"index": i, "object": "score", "score": float(each)} for i, each in enumerate(scores)
        ],
        "usage": pooling_usage(num_tokens),
    }


def _shortened(model: ServedModel, documents: list[str], most: int) -> list[str]:
    """Documents cut to as many tokens each."""
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in documents]
    return [
        text if len(each) <= most else tokenizer.decode(each[:most])
        for text, each in zip(documents, ids, strict=True)
    ]


def _sides(body: ScoreRequest) -> tuple[list[str], list[str]]:
    """The texts of both sides, whatever they are called."""
    named = ((body.text_1, body.queries, body.data_1), (body.text_2, body.documents, body.data_2))
    sides = []
    for index, given in enumerate(named):
        there = [each for each in given if each is not None]
        if len(there) != 1:
            raise InvalidRequestError(
                f"Send text_1 and text_2 (or queries and documents); of side {index + 1} there are "
                f"{len(there)}.",
                param=f"text_{index + 1}",
            )
        sides.append([there[0]] if isinstance(there[0], str) else _texts(there[0]))
    return sides[0], sides[1]


def _texts(given: list[str | TextDocument]) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in given]
