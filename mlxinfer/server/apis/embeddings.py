"""POST /v1/embeddings: vectors of texts and token ids."""

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ...errors import InvalidRequestError
from ...session.inputs import EmbedInput
from ...session.pooling_session import PoolingSession
from ..call import Call
from ..http import RequestBody

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
Input = str | list[str | int | list[int]]


class EmbeddingRequest(RequestBody, kw_only=True):
    """Texts or token ids; fields behind `user` are vLLM's, TEI's and Cohere's."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
    }

    model: str | None = None
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncate: bool | None = None
    normalize: bool | None = None
    prompt_name: str | None = None  # which of the model's own prompts stands before the texts
    prompt: str | None = None  # a text that stands there instead
    input_type: str | None = None  # as prompt_name, by other servers' words


def pooling_usage(num_tokens: int) -> dict[str, int]:
    """The number of tokens that were read."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def embed(call: Call, body: EmbeddingRequest) -> dict[str, Any]:
    """The vectors of texts."""
    model = await call.model(body.model)
    given = EmbedInput(
        texts=read_input(body.input),
        prompt_name=_prompt_name(model.pooler, body),
        prompt=body.prompt,
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate=truncation(body.truncate_prompt_tokens, body.truncate),
    )
    num_tokens, vectors = await call.pool(model, lambda: model.pooler.read_texts(given))

    def answer() -> dict[str, Any]:
        found: list[Any] = vectors.tolist()
        if body.encoding_format == "base64":
            found = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": each}
            for index, each in enumerate(found)
        ]
        usage = pooling_usage(num_tokens)
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    return await call.in_worker(answer)


def truncation(tokens: int | None, flag: bool | None = None) -> int | bool:
    """How texts that are too long are cut, as PoolingSession.embed takes it.

    Raises:
        InvalidRequestError: no tokens would be left.
    """
    if tokens is None:
        return bool(flag)
    if tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0; expected a number of tokens, or -1.",
            param="truncate_prompt_tokens",
        )
    return True if tokens == -1 else tokens


def read_input(given: Input) -> list[str | list[int]]:
    """One text, several, one list of token ids, or several.

    Raises:
        InvalidRequestError: nothing, too many, or a mixture of ids and texts.
    """
    if isinstance(given, str):
        return [given]
    if given and all(type(item) is int for item in given):
        return [given]  # type: ignore[list-item]  # they are ids
    if not 0 < len(given) <= MAX_INPUTS:
        raise InvalidRequestError(
            f"input has {len(given)} texts; expected 1 to {MAX_INPUTS}.", param="input"
        )
    if any(type(item) is int for item in given):
        raise InvalidRequestError(
            "input mixes token ids with texts; expected texts, ids, or lists of ids.",
            param="input",
        )
    return given  # type: ignore[return-value]  # checked


def _prompt_name(session: PoolingSession, body: EmbeddingRequest) -> str | None:
    """The model's own prompt that stands before the texts, by prompt_name or input_type."""
    if body.prompt_name is not None or body.input_type is None:
        return body.prompt_name
    if body.input_type not in INPUT_TYPES:
        raise InvalidRequestError(
            f"input_type is {body.input_type[:40]!r}; expected one of {', '.join(INPUT_TYPES)}.",
            param="input_type",
        )
    names = INPUT_TYPES[body.input_type]
    return next((name for name in names if name in session.pooling.prompts), None)
