"""A model that is open: loaded in this process, or behind a server. The base of LLM."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from . import hub
from .backend import require_mlx
from .boundary import public
from .errors import InvalidRequestError
from .outputs import Facts, Ranked
from .progress import patient, progress_bars
from .session.engine_factory import EngineArguments, EngineOptions
from .session.pooling_rows import Text
from .session.pooling_session import PoolingSession, open_session
from .session.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class OpenModel:
    """What any model has: its facts and files, and vectors and scores where it pools.

    Args:
        session: of the model, as `load_session` and `connect` give it.
    """

    def __init__(self, session: Session | PoolingSession) -> None:
        self._session = session
        self.model_info = session.info

    @public
    def stats(self) -> dict[str, Any]:
        """Counters, pages and memory of the engine, as plain numbers; a card in a notebook."""
        return Facts(self._session.stats())

    @public
    def close(self) -> None:
        """Abort running requests and free the memory; closing twice is fine."""
        self._session.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "An LLM is neither copied nor pickled: its engine lives in this process. Give another "
            "one the model's name, and build an LLM there."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine ended after a fault."""
        return self._session.closed

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"LLM({self.model_info.name!r}, {self.model_info.summary}{state})"

    def _repr_html_(self) -> str:
        from .display.cards import facts_card

        info, state = self.model_info, " (closed)" if self.closed else ""
        context = f"{info.max_context:,} tokens" if info.max_context else "-"
        facts = {"model": info.summary, "context": context}
        if isinstance(self._session, Session):
            facts["chat"] = self._session.chat_params.words
        return facts_card(f"{info.name}{state}", facts)

    @property
    def path(self) -> Path:
        """The folder of the model; raises InvalidRequestError where it is a server's."""
        return self._session.path

    @property
    def tokenizer(self) -> Any:
        """Of the model; raises InvalidRequestError where it is a server's."""
        return self._session.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._session.end_ids

    # -- vectors and scores -----------------------------------------------------------------------

    @public
    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: int | bool = False,
    ) -> "NDArray[np.float32]":
        """Vectors of texts, as sentence-transformers gives them: pooled as the model's files say.

        Args:
            texts: a text or token ids, or a list of these. Special tokens that are spelled in a
                text are text.
            prompt_name: which of the model's own prompts stands before each text, such as "query";
                None: the one that its files name as the default, or none.
            prompt: a text that stands there instead.
            dimensions: cut each vector to its first so many numbers, and bring it to length 1 if
                the model does so: for models that were trained for that (Matryoshka).
            normalize: bring vectors to length 1; None: as the model's files say.
            truncate: texts that are longer lose what is behind so many tokens, or (True) what the
                model does not read; False: they are refused.

        Returns:
            (N, dim) float32, one row for each text.

        Raises:
            InvalidRequestError: the model gives no vectors, has no such prompt, or none so long.
            ContextLengthError: a text is too long.
        """
        return self._pooler("embed").embed(
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )

    @public
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: int | bool = False,
    ) -> list[Ranked]:
        """Documents by how well they go with a query, the best first.

        A reranker reads query and document together; with an embedding model their vectors are
        compared, read with its prompts "query" and "document" where it has such.

        Args:
            query: a text.
            documents: texts.
            top_n: leave out all but the best so many.
            instruction: what counts as a match, for models that read one (Qwen3-Reranker).
            truncate: as of `embed`; of a pair the longer text is cut first.

        Returns:
            For each document: `index` in the list given, `score`, `document`.

        Raises:
            InvalidRequestError: the model gives no scores, or reads no instruction.
            ContextLengthError: a text is too long.
        """
        pooler = self._pooler("rerank")
        return pooler.rerank(
            query, documents, top_n=top_n, instruction=instruction, truncate=truncate
        )

    @public
    def score(
        self,
        a: str | Sequence[str],
        b: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: int | bool = False,
    ) -> "NDArray[np.float32]":
        """How well each text of `a` goes with that of `b`; one text goes with each of the other's.

        Returns:
            (N,) float32: of a reranker what its files say, mostly from 0 to 1; of an embedding
            model the similarity of the vectors, mostly their cosine.

        Raises:
            As of `rerank`, and InvalidRequestError for different numbers of texts.
        """
        return self._pooler("score").score(a, b, instruction=instruction, truncate=truncate)

    def _pooler(self, method: str) -> PoolingSession:
        """The session of a model that pools; raises InvalidRequestError for another."""
        session = self._session
        if isinstance(session, Session):
            raise InvalidRequestError(
                f"{session.info.name} generates text and has no {method}(); load an embedding "
                "model or a reranker, such as LLM('BAAI/bge-small-en-v1.5'). A model that is one "
                "though its files do not say so is loaded with task='embed' or task='score'.",
            )
        return session


def load_session(
    name: str, arguments: EngineArguments, tool_format: str, progress: bool | None
) -> Session | PoolingSession:
    """Find, download and load a model; its bars go on from each other."""
    with progress_bars(wanted=progress) as show:

        def find(model: str) -> Path:
            return hub.resolve(
                model,
                progress=lambda step: show(f"download {model}", step.done_bytes, step.total_bytes),
            )

        options = EngineOptions.of(arguments, find)
        require_mlx()
        folder, show_load = find(name), patient(show)
        return open_session(
            name,
            folder,
            options,
            tool_format,
            lambda done, total: show_load(f"load {name}", done, total),
            given=arguments,
        )


def connect(
    url: str, api_key: str | None, served_model: str | None, options: EngineArguments
) -> Session:
    """A server's model, with a Session's methods; raises InvalidRequestError for its options."""
    if options:
        raise InvalidRequestError(
            f"{', '.join(options)}: the engine at {url} was set up where it was started "
            "(`mlxinfer serve --help`); leave out what is an engine's.",
            param=next(iter(options)),
        )
    from .remote.session import RemoteSession

    return cast(Session, RemoteSession(url, api_key, served_model))
