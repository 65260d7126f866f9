"""LLM's vectors and scores: embed, rerank, score; and what a model is not for, by name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .boundary import public
from .errors import InvalidRequestError
from .outputs import Ranked
from .session.pooling_rows import Text
from .session.pooling_session import PoolingSession
from .session.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Retrieval:
    """The methods of LLM for embedding models and rerankers."""

    _session: Session | PoolingSession

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
