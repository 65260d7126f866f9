"""A loaded embedding model or reranker: texts in, vectors and scores out."""

import asyncio
import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..backend import require_mlx
from ..core import FinishReason, TokenEvent, check_switch
from ..errors import EngineClosedError, InvalidRequestError, shown
from ..models import stoppable
from ..outputs import Ranked
from ..pooling.config import Normalise, PoolingConfig, Task, read_pooling
from ..pooling.request import PoolingLimits, PoolingRequest, TokenRow
from ..text import Tokenizer
from .base import ModelSession
from .engine_client import Mailbox
from .engine_factory import ModelInfo, describe
from .options import EngineOptions
from .pooling_rows import DOCUMENT, QUERY, RowBuilder, Text, resolved
from .ranking import check_list, paired, places, ranked, similarity, unit
from .session import CANARY_TOKEN, Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.engine import EngineLoop

    Vectors = NDArray[np.float32]

Watch = Callable[[int, int], None]
POOLING_OPTIONS = ("dtype", "max_context", "prefill_chunk", "task")


class PoolingSession(ModelSession):
    """A model that pools, its engine, and the way in and out.

    Args:
        name: of the model, for people.
        folder: with the checkpoint.
        options: of the engine: dtype and max_context count.
        pooling: as `read_pooling` gives it.
        watch: is called with the bytes of weights that are loaded, and with all of them.

    Attributes:
        info: what the model is.
        rows: texts to rows.

    Raises:
        ModelError: the model is broken or not supported.
        BackendMissingError: MLX does not run here.
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

        tokenizer = Tokenizer.from_folder(folder)
        self.pooling = resolved(pooling, tokenizer, name)
        self.info: ModelInfo
        described: list[ModelInfo] = []
        watch, stop = stoppable(watch)
        make = _loop_maker(name, folder, options, self.pooling, described, watch)
        self.engine = Engine(make, owner=self, stop_loading=stop)
        self.info = described[0]
        self.rows = RowBuilder(
            tokenizer, self.pooling, self.info.max_context, self.info.architecture
        )
        self._ids = itertools.count()

    # -- what it is -----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.rows.tokenizer

    def refuse(self, method: str) -> NoReturn:
        """Raise InvalidRequestError: only models that generate text have the method."""
        kind, methods = "a reranker", "rerank(query, documents) or score(a, b)"
        if self.embeds:
            kind, methods = "an embedding model", "embed(texts), rerank or score"
        raise InvalidRequestError(f"{self.info.name} is {kind} and gives no text; call {methods}.")

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.info.path

    @property
    def limits(self) -> PoolingLimits:
        """What requests must fit into."""
        limits: PoolingLimits = self.engine.limits
        return limits

    @property
    def embeds(self) -> bool:
        """Whether it gives vectors; else it scores pairs."""
        return self.pooling.task is Task.EMBED

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer: there are no answers."""
        return frozenset()

    def require_vectors(self) -> None:
        """Raise InvalidRequestError where the model scores pairs."""
        if not self.embeds:
            raise InvalidRequestError(
                f"{self.info.name} is a reranker and gives no vectors; ask it for scores: "
                "rerank(query, documents), score(a, b), /v1/rerank or /v1/score.",
                param="model",
            )

    # -- vectors and scores ---------------------------------------------------------------------

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: int | bool = False,
    ) -> "Vectors":
        """Vectors (N, dim); arguments and errors as of LLM.embed."""
        self.require_vectors()
        self.check_dimensions(dimensions)
        if normalize is not None:
            check_switch("normalize", normalize)
        check_list("texts", texts)
        before = self.prompt(prompt_name, prompt)
        many = [texts] if isinstance(texts, str) or _is_ids(texts) else texts
        rows = self.rows.texts(many, prompt=before, truncate=truncate)  # type: ignore[arg-type]
        return self.finished_vectors(self.run(rows), dimensions, normalize)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: int | bool = False,
    ) -> list[Ranked]:
        """Documents by their scores; arguments and errors as of LLM.rerank."""
        if not isinstance(query, str):
            raise InvalidRequestError(f"query is {shown(query)}; expected a text.", param="query")
        if isinstance(documents, str):
            raise InvalidRequestError(
                "documents is a text; expected a list of them.", param="documents"
            )
        check_list("documents", documents)
        queries = [query] * len(documents)
        scores = self.score(queries, documents, instruction=instruction, truncate=truncate)
        return ranked(documents, scores, top_n)

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: int | bool = False,
    ) -> "Vectors":
        """Scores (N,); arguments and errors as of LLM.score."""
        one, two = paired(first, second)
        rows = self.score_rows(one, two, instruction=instruction, truncate=truncate)
        return self.finished_scores(self.run(rows), one, two)

    def score_rows(
        self,
        first: Sequence[str],
        second: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: int | bool = False,
        param: str = "documents",
    ) -> list[TokenRow]:
        """Rows, for `finished_scores` to make scores of; arguments as of RowBuilder.pairs.

        An embedding model reads every text once, however many pairs it is in.
        """
        if not self.embeds:
            how: dict[str, Any] = {"instruction": instruction, "truncate": truncate}
            return self.rows.pairs(first, second, param=param, **how)
        if instruction is not None:
            raise InvalidRequestError(
                f"{self.info.name} is an embedding model and reads no instruction; leave it out.",
                param="instruction",
            )
        rows = []
        for texts, role in ((first, QUERY), (second, DOCUMENT)):
            prompt = self.pooling.prompts.get(role) or self.pooling.prompt(None)
            unique = list(dict.fromkeys(texts))
            rows += self.rows.texts(unique, prompt=prompt, truncate=truncate, param=param)
        return rows

    def finished_vectors(
        self, vectors: "Vectors", dimensions: int | None = None, normalize: bool | None = None
    ) -> "Vectors":
        """Vectors cut to `dimensions`, and of length 1 where the model's files or `normalize` say.

        Source of the cut: Matryoshka representations, arXiv 2205.13147.

        Raises:
            InvalidRequestError: `normalize` is False, and the model itself normalises.
        """
        cut = vectors if dimensions is None else vectors[:, :dimensions]
        own = any(isinstance(module, Normalise) for module in self.pooling.modules)
        if own and normalize is False:
            raise InvalidRequestError(
                "This model's own files bring its vectors to length 1, so there are none of other "
                "lengths: leave normalize out.",
                param="normalize",
            )
        if normalize if normalize is not None else (own and cut is not vectors):
            return unit(cut)
        return cut

    def finished_scores(
        self, results: "Vectors", first: Sequence[str], second: Sequence[str]
    ) -> "Vectors":
        """Scores (N,) of what the model gave for `score_rows` of the same texts."""
        if not self.embeds:
            return results[:, 0]
        ones, others = places(first), places(second)  # of each text's row
        one = results[[ones[text] for text in first]]
        other = results[[len(ones) + others[text] for text in second]]
        return similarity(self.pooling.similarity, one, other)

    def prompt(self, name: str | None, text: str | None) -> str:
        """What stands before texts: the one given, or the model's own of this name.

        Raises:
            InvalidRequestError: both are given, or the model has none of this name.
        """
        if text is None:
            return self.pooling.prompt(name)
        if name is not None:
            raise InvalidRequestError(
                "prompt and prompt_name say the same thing; leave one of them out.", param="prompt"
            )
        return text

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequestError for a length that vectors cannot be cut to."""
        most, lengths = self.info.embedding_dim or 0, self.pooling.matryoshka
        if dimensions is None:
            return
        if type(dimensions) is not int or not 1 <= dimensions <= most:
            raise InvalidRequestError(
                f"dimensions is {shown(dimensions)}; expected a number from 1 to {most}.",
                param="dimensions",
            )
        if lengths and dimensions not in (*lengths, most):
            raise InvalidRequestError(
                f"dimensions is {dimensions}; this model was trained for "
                f"{', '.join(map(str, sorted(lengths)))}.",
                param="dimensions",
            )

    # -- requests -------------------------------------------------------------------------------

    def request(self, rows: Sequence[TokenRow]) -> PoolingRequest:
        """A request for the results of rows."""
        return PoolingRequest(f"pool-{next(self._ids)}", rows)

    def run(self, rows: Sequence[TokenRow]) -> "Vectors":
        """What the model gives for rows, (N, d) float32.

        Raises:
            ContextLengthError, InvalidRequestError: a row can never run.
            RequestFailedError: a pass failed.
            EngineClosedError: the engine was closed.
        """
        request = self.request(rows)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        leave = self.engine.aborter([request.id])
        try:
            self.engine.submit(request, events.put)
            return pooled(events.get())
        except BaseException:  # the caller leaves: an error, Ctrl-C
            leave()
            raise

    async def arun(self, request: PoolingRequest) -> "Vectors":
        """`run` for asyncio; cancelling the task ends the request."""
        inbox: asyncio.Queue[TokenEvent] = asyncio.Queue()
        mailbox: Mailbox[TokenEvent] = Mailbox(asyncio.get_running_loop())
        leave = self.engine.aborter([request.id])
        try:
            self.engine.submit(request, lambda event: _post(mailbox, inbox, event))
            return pooled(await inbox.get())
        except BaseException:  # as above; or a cancelled task
            leave()
            raise

    async def canary(self) -> None:
        """Compute one token; raises RequestFailedError, or EngineClosedError after `close`."""
        await self.arun(self.request([TokenRow([CANARY_TOKEN])]))

    # -- its state ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and memory of the engine; raises EngineClosedError after `close`."""
        return self.engine.stats()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine ended after a fault."""
        return self.engine.closed

    def close(self) -> None:
        """End what runs and free the memory; closing twice is fine."""
        self.engine.close()


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

    Args:
        name, folder, options, tool_format, watch: as of Session.
        given: names of options that were chosen for this model alone.

    Raises:
        InvalidRequestError: an option of text was chosen for a model that gives none.
        what else Session and PoolingSession raise.
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


def pooled(event: TokenEvent) -> "Vectors":
    """The result of a request; raises its error, EngineClosedError where it was aborted."""
    if event.error is not None:
        raise event.error
    if event.pooled is None or event.finish_reason is FinishReason.ABORT:
        raise EngineClosedError("The engine was closed.")
    return event.pooled


def _is_ids(texts: Any) -> bool:
    """Whether this is one text as token ids, not a list of texts."""
    return bool(texts) and all(type(each) is int for each in texts)


def _post(
    mailbox: "Mailbox[TokenEvent]", inbox: "asyncio.Queue[TokenEvent]", event: TokenEvent
) -> None:
    mailbox.post(inbox, event)  # a loop that is closed has no reader


def _loop_maker(
    name: str,
    folder: Path,
    options: EngineOptions,
    pooling: PoolingConfig,
    described: list[ModelInfo],
    watch: Watch | None,
) -> "Callable[[Any], EngineLoop]":
    """What loads the model on the engine's thread; its facts go to `described`."""

    def make(emit: Any) -> "EngineLoop":
        from ..pooling.loop import PoolingLoop
        from ..pooling.model import load_pooling

        made = load_pooling(folder, pooling, dtype=options.dtype, watch=watch)
        most = made.model.config.max_context
        read = min(pooling.max_tokens or most, most)
        limit = min(options.max_context or read, most)
        info = describe(name, folder, made.model)
        described.append(
            replace(
                info,
                task=str(pooling.task),
                embedding_dim=made.dim if pooling.task is Task.EMBED else None,
                max_context=limit,
                weights_bytes=made.num_bytes,
                kv_bytes_per_token=0,
            )
        )
        return PoolingLoop(made, emit, max_context=limit, pass_tokens=options.prefill_chunk)

    return make
