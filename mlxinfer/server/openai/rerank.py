"""POST /v1/rerank and /v1/score: how well texts go together, in the forms of Jina, Cohere, vLLM."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import InvalidRequestError
from ...outputs import Ranked
from ...pooling.request import TokenRow
from ...session.ranking import paired, ranked
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..fields.checks import refuse
from ..http.replies import Reply, json_body
from ..registry.served import ServedModel
from .embeddings import PoolingUsage, Truncate, truncation

if TYPE_CHECKING:
    from ...session.pooling_session import Vectors

MAX_PAIRS = 4096  # of one request


class TextDocument(msgspec.Struct, kw_only=True):
    """A document in an object, as Jina and Cohere take it."""

    text: str


Texts = str | list[str | TextDocument]


class RerankRequest(msgspec.Struct, kw_only=True):
    """A query and documents."""

    model: str | None = None
    query: str
    documents: list[str | TextDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None  # default true, as vLLM has it
    instruction: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncate: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None
    max_chunks_per_doc: Any = None
    rank_fields: Any = None
    user: str | None = None

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for what would change the answer and is not there."""
        refuse("max_chunks_per_doc", self.max_chunks_per_doc, (1,))
        refuse("rank_fields", self.rank_fields, (["text"],))


class RankedDocument(msgspec.Struct, kw_only=True):
    """One document, by its place in the request."""

    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class Reranked(msgspec.Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage
    meta: dict[str, Any]  # where Cohere's clients look for usage


class ScoreRequest(msgspec.Struct, kw_only=True):
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


class Score(msgspec.Struct, kw_only=True):
    """Of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """In the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


async def rerank(call: Call, body: RerankRequest) -> Reply:
    """Documents by how well they go with a query."""
    body.refuse()
    model = await call.model(body.model)
    documents = _texts(body.documents)
    if not 0 < len(documents) <= MAX_PAIRS:
        raise InvalidRequestError(
            f"There are {len(documents)} documents; expected 1 to {MAX_PAIRS}.", param="documents"
        )
    queries = [body.query] * len(documents)
    cut = truncation(body.truncate_prompt_tokens, body.truncate)
    texts, most = documents, body.max_tokens_per_doc
    if most is not None:
        texts = await call.in_worker(_shortened, model, documents, most)
    rows, scores = await _scores(call, model, queries, texts, body.instruction, cut)
    found = ranked(documents, scores, body.top_n or None)
    shows = body.return_documents is not False
    usage = PoolingUsage.of(rows)
    return json_body(
        Reranked(
            id=f"rerank-{call.id}",
            model=model.name,
            results=[_document(each, shows) for each in found],
            usage=usage,
            meta={
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": usage.prompt_tokens},
            },
        )
    )


async def score(call: Call, body: ScoreRequest) -> Reply:
    """The scores of pairs of texts."""
    model = await call.model(body.model)
    one, other = paired(*_sides(body), names=("text_1", "text_2"))
    if len(one) > MAX_PAIRS:
        raise InvalidRequestError(
            f"There are {len(one)} pairs; expected at most {MAX_PAIRS}.", param="text_1"
        )
    cut = truncation(body.truncate_prompt_tokens, body.truncate)
    rows, scores = await _scores(call, model, one, other, body.instruction, cut)
    return json_body(
        Scores(
            id=f"score-{call.id}",
            created=call.created_s,
            model=model.name,
            data=[Score(index=i, score=float(each)) for i, each in enumerate(scores)],
            usage=PoolingUsage.of(rows),
        )
    )


RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
SCORE_PATHS = ("/v1/score", "/score")
ENDPOINTS = (
    *(
        Endpoint(
            method="POST",
            path=path,
            handler=rerank,
            summary="Documents by how well they go with a query.",
            body=RerankRequest,
            answer=Reranked,
            operation=f"rerank{number or ''}",
        )
        for number, path in enumerate(RERANK_PATHS)
    ),
    *(
        Endpoint(
            method="POST",
            path=path,
            handler=score,
            summary="The scores of pairs of texts.",
            body=ScoreRequest,
            answer=Scores,
            operation=f"score{number or ''}",
        )
        for number, path in enumerate(SCORE_PATHS)
    ),
)


async def _scores(
    call: Call,
    model: ServedModel,
    one: list[str],
    other: list[str],
    instruction: str | None,
    truncate: int | bool,
) -> "tuple[list[TokenRow], Vectors]":
    """The rows that were read, and a score for each pair."""
    session = model.pooler

    def read() -> list[TokenRow]:
        return session.score_rows(one, other, instruction=instruction, truncate=truncate)

    rows = await call.in_worker(read)
    results = await call.pool(model, rows)
    return rows, session.finished_scores(results, one, other)


def _shortened(model: ServedModel, documents: list[str], most: int) -> list[str]:
    """Documents cut to as many tokens each."""
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in documents]
    return [
        text if len(each) <= most else tokenizer.decode(each[:most])
        for text, each in zip(documents, ids, strict=True)
    ]


def _document(found: Ranked, shows: bool) -> RankedDocument:
    made = RankedDocument(index=found.index, relevance_score=found.score)
    if shows:
        made.document = TextDocument(text=found.document)
    return made


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
