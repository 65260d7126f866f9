"""A loaded embedding model or reranker: texts in, vectors and scores out."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..backend import limit_memory, require_mlx
from ..core import FinishReason, TokenEvent
from ..errors import EngineClosedError, InvalidRequestError, wrong_value
from ..models import Watch, stoppable
from ..pooling.config import NORMALISE, PoolingConfig, Task, read_pooling
from ..pooling.request import PoolingLimits, PoolingRequest, TokenRow
from ..text import Tokenizer
from .base import LocalSession
from .engine_factory import ModelInfo, describe
from .inputs import EmbedInput, ScoreInput
from .options import EngineOptions
from .pooling_rows import DOCUMENT, QUERY, RowBuilder, resolved
from .session import CANARY_TOKEN, Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.engine import Engine
    from ..pooling.loop import PoolingLoop

    Vectors = NDArray[np.float32]

POOLING_OPTIONS = ("dtype", "max_context", "prefill_chunk", "task")


class PoolingSession(LocalSession):
    """An embedding model or a reranker with its engine: inputs in, vectors or scores out.

    Args:
        name: of the model, for people.
        options: of the engine; only POOLING_OPTIONS have an effect.
        pooling: as `read_pooling` gives it.
        watch: is called with the bytes of weights that are loaded, and with all of them.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: EngineOptions,
        pooling: PoolingConfig,
        watch: Watch | None = None,
    ) -> None:
        require_mlx()
        from ..engine.engine import Engine  # imports mlx; where it is missing, require_mlx says why

        if options.chat_template is not None:
            raise InvalidRequestError(
                f"{name} makes vectors or scores and renders no chat_template; leave it out.",
                param="chat_template",
            )
        tokenizer = Tokenizer.from_folder(folder)
        self.pooling = resolved(pooling, tokenizer, name)
        self.info: ModelInfo
        watch, stop = stoppable(watch)
        make = _loop_maker(folder, options, self.pooling, watch)
        self.engine = Engine(make, owner=self, stop_loading=stop)
        self.info = self.engine.call(partial(_described, name, folder, self.pooling))
        self.rows = RowBuilder(tokenizer, self.pooling, self.info.max_context)
        self._ids = itertools.count()

    # -- what it is -----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self.rows.tokenizer

    def refuse(self, method: str) -> NoReturn:
        kind, methods = "a reranker", "rerank(query, documents), score(a, b)"
        if self.embeds:
            kind, methods = "an embedding model", "embed(texts), /v1/embeddings, rerank, score"
        raise InvalidRequestError(
            f"{self.info.name} is {kind} and gives no text; ask it for {methods}, /v1/rerank or "
            "/v1/score.",
            param="model",
        )

    @property
    def limits(self) -> PoolingLimits:
        limits: PoolingLimits = self.engine.limits
        return limits

    @property
    def embeds(self) -> bool:
        """Whether it gives vectors; else it scores pairs."""
        return self.pooling.task is Task.EMBED

    @property
    def capabilities(self) -> frozenset[str]:
        """Holds "rerank", and "embeddings" where it gives vectors."""
        return frozenset(("embeddings", "rerank") if self.embeds else ("rerank",))

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset()

    def require_vectors(self) -> None:
        if not self.embeds:
            raise InvalidRequestError(
                f"{self.info.name} is a reranker and gives no vectors; ask it for scores: "
                "rerank(query, documents), score(a, b), /v1/rerank or /v1/score.",
                param="model",
            )

    # -- vectors and scores ---------------------------------------------------------------------

    def embed(self, given: EmbedInput) -> "Vectors":
        return self.read_texts(given).result()

    def score(self, given: ScoreInput) -> "Vectors":
        return self.read_pairs(given).result()

    def read_texts(self, given: EmbedInput) -> "Pooled":
        """The vectors of texts, to be computed. May take long: call it in a worker thread."""
        self.require_vectors()
        self._check_dimensions(given.dimensions)
        prompt = given.prompt
        if prompt is None:
            prompt = self.pooling.prompt(given.prompt_name)
        elif given.prompt_name is not None:
            raise InvalidRequestError(
                "prompt and prompt_name say the same thing; leave one of them out.", param="prompt"
            )
        rows = self.rows.texts(
            given.each, prompt=prompt, truncate=given.truncate, param=given.place
        )
        return self.pooled(rows, partial(self._finished_vectors, given))

    def read_pairs(self, given: ScoreInput) -> "Pooled":
        """The scores of pairs, to be computed; as `read_texts`.

        An embedding model reads every text once, however many pairs it is in.
        """
        one, two = given.pairs
        how: dict[str, Any] = {"truncate": given.truncate, "param": given.place}
        if not self.embeds:
            rows = self.rows.pairs(one, two, instruction=given.instruction, **how)
            return self.pooled(rows, lambda scores: scores[:, 0])
        if given.instruction is not None:
            raise InvalidRequestError(
                f"{self.info.name} is an embedding model and reads no instruction; leave it out.",
                param="instruction",
            )
        rows = []
        for texts, role in ((one, QUERY), (two, DOCUMENT)):
            prompt = self.pooling.prompts.get(role) or self.pooling.prompt(None)
            rows += self.rows.texts(list(dict.fromkeys(texts)), prompt=prompt, **how)
        return self.pooled(rows, partial(self._similarities, one, two))

    def pooled(
        self,
        rows: Sequence[TokenRow],
        finish: "Callable[[Vectors], Vectors]" = lambda vectors: vectors,
    ) -> "Pooled":
        """The output of the model for rows, (N, d) float32, after `finish`."""
        request = PoolingRequest(f"pool-{next(self._ids)}", rows)
        return Pooled(self.engine, request, finish, owner=self)

    def _finished_vectors(self, given: EmbedInput, vectors: "Vectors") -> "Vectors":
        """Vectors cut to a length, and of length 1 where the model's files or the input say so.

        Source of the cut: Matryoshka representations, arXiv 2205.13147.
        """
        cut = vectors if given.dimensions is None else vectors[:, : given.dimensions]
        normalised = NORMALISE in self.pooling.modules
        if normalised and given.normalize is False:
            raise InvalidRequestError(
                "This model's own files bring its vectors to length 1, so there are none of other "
                "lengths: leave normalize out.",
                param="normalize",
            )
        wanted = given.normalize
        return (
            unit(cut) if wanted or (wanted is None and normalised and cut is not vectors) else cut
        )

    def _similarities(
        self, first: Sequence[str], second: Sequence[str], vectors: "Vectors"
    ) -> "Vectors":
        """Scores (N,) of pairs, from the vectors of the first texts and of the second ones."""
        rows, columns = places(first), places(second)  # of each text's row
        first_vectors = vectors[[rows[text] for text in first]]
        second_vectors = vectors[[len(rows) + columns[text] for text in second]]
        return similarity(self.pooling.similarity, first_vectors, second_vectors)

    def _check_dimensions(self, dimensions: int | None) -> None:
        most, lengths = self.info.embedding_dim or 0, self.pooling.matryoshka
        if dimensions is None:
            return
        if type(dimensions) is not int or not 1 <= dimensions <= most:
            raise wrong_value("dimensions", dimensions, f"a number from 1 to {most}")
        if lengths and dimensions not in (*lengths, most):
            raise InvalidRequestError(
                f"dimensions is {dimensions}; this model was trained for "
                f"{', '.join(map(str, sorted(lengths)))}.",
                param="dimensions",
            )

    async def canary(self) -> None:
        await self.pooled([TokenRow([CANARY_TOKEN])]).aresult()


def open_session(
    name: str,
    folder: Path,
    options: EngineOptions,
    tool_format: str = "auto",
    watch: Watch | None = None,
    *,
    given: Iterable[str] = (),
) -> Session | PoolingSession:
    """The session of the model in a folder, by what the model is for.

    `given`: names of options that were chosen for this model alone; those of text are refused
    for a model that gives none.
    """
    pooling = read_pooling(folder, name, options.task)
    if pooling is not None:
        for option in given:
            if option not in POOLING_OPTIONS:
                raise InvalidRequestError(
                    f"{option} is for models that generate text, and {name} gives "
                    f"{'vectors' if pooling.task is Task.EMBED else 'scores'}; its options: "
                    f"{', '.join(POOLING_OPTIONS)}.",
                    param=option,
                )
        return PoolingSession(name, folder, options, pooling, watch)
    return Session(name, folder, options, tool_format, watch)


class Pooled:
    """The result of one input, computed when `result` or `aresult` is called.

    Args:
        finish: makes vectors or scores of what the model gives for the rows.
        owner: is referred to, so that the model stays as long.
    """

    def __init__(
        self,
        engine: "Engine",
        request: PoolingRequest,
        finish: "Callable[[Vectors], Vectors]",
        *,
        owner: object,
    ) -> None:
        self.request = request
        self._engine, self._finish, self._owner = engine, finish, owner
        self._leave = engine.aborter([request.id])

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    def result(self) -> "Vectors":
        """(N, dim) float32 vectors, or (N,) scores."""
        try:
            return self._finish(_pooled_of(self._submit().result()))
        except BaseException:  # the caller leaves: an error, Ctrl-C
            self._leave()
            raise

    async def aresult(self) -> "Vectors":
        try:
            event = await asyncio.wrap_future(self._submit())
        except BaseException:  # as above; or a cancelled task
            self._leave()
            raise
        return await asyncio.to_thread(self._finish, _pooled_of(event))

    def _submit(self) -> "Future[TokenEvent]":
        waiting: Future[TokenEvent] = Future()
        waiting.set_running_or_notify_cancel()  # a cancelled task does not cancel the engine's part
        self._engine.submit(self.request, waiting.set_result)
        return waiting


def _pooled_of(event: TokenEvent) -> "Vectors":
    if event.error is not None:
        raise event.error
    if event.pooled is None or event.finish_reason is FinishReason.ABORT:
        raise EngineClosedError("The engine was closed.")
    return event.pooled


def similarity(name: str, one: "Vectors", other: "Vectors") -> "Vectors":
    """(N,) of vectors (N, d): the larger, the closer; as sentence-transformers has it."""
    import numpy as np

    if name == "cosine":
        one, other = unit(one), unit(other)
    if name in ("cosine", "dot"):
        return (one * other).sum(axis=1)
    apart = one - other
    if name == "euclidean":
        return -np.sqrt(np.square(apart).sum(axis=1))
    return -np.abs(apart).sum(axis=1)


def places(texts: Sequence[str]) -> dict[str, int]:
    return {text: i for i, text in enumerate(dict.fromkeys(texts))}


def unit(vectors: "Vectors") -> "Vectors":
    import numpy as np

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = vectors / np.maximum(lengths, 1e-12)
    return unit


def _loop_maker(
    folder: Path, options: EngineOptions, pooling: PoolingConfig, watch: Watch | None
) -> "Callable[[Any], PoolingLoop]":
    def make(emit: Any) -> "PoolingLoop":
        from ..pooling.loop import PoolingLoop
        from ..pooling.model import load_pooling

        made = load_pooling(folder, pooling, dtype=options.dtype, watch=watch)
        limit_memory(made, made.num_bytes)
        most = made.model.config.max_context
        read = min(pooling.max_tokens or most, most)
        limit = min(options.max_context or read, most)
        return PoolingLoop(made, emit, max_context=limit, pass_tokens=options.prefill_chunk)

    return make


def _described(name: str, folder: Path, pooling: PoolingConfig, loop: "PoolingLoop") -> ModelInfo:
    return replace(
        describe(name, folder, loop.model.model),
        task=str(pooling.task),
        embedding_dim=loop.model.dim if pooling.task is Task.EMBED else None,
        max_context=loop.limits.max_context,
        weights_bytes=loop.model.num_bytes,
        kv_bytes_per_token=0,
    )
