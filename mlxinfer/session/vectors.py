"""Vectors and scores: methods of LLM for models that pool."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..outputs import Ranked, ranked
from .base import ModelSession
from .inputs import EmbedInput, ScoreInput, Text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class VectorMethods:
    """Methods for embedding models and rerankers; other models refuse them."""

    _session: ModelSession

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
            prompt_name: the model's own prompt that stands before each text, such as "query";
                None: the default of its files, or none.
            prompt: a text that stands there instead.
            dimensions: keep this many numbers of each vector, from the first on, and normalise
                again if the model does so. For models trained for it (Matryoshka).
            normalize: bring vectors to length 1; None: as the model's files say.
            truncate: cut longer texts to this many tokens, or (True) to what the model reads;
                False: refuse them.

        Returns:
            (N, dim) float32, one row for each text.

        Raises:
            InvalidRequestError: the model gives no vectors, none of this size, or has no such
                prompt.
            ContextLengthError: a text is too long.
        """
        given = EmbedInput(
            texts=texts,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )
        return self._session.embed(given)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: int | bool = False,
    ) -> list[Ranked]:
        """Documents by how well they match a query, the best first.

        A reranker reads query and document together. An embedding model gives vectors of both, with
        its prompts "query" and "document" if it has them, and the vectors are compared.

        Args:
            query: a text.
            documents: texts.
            top_n: return only this many.
            instruction: what counts as a match, for models that read one (Qwen3-Reranker).
            truncate: see `embed`. The longer text of a pair is cut first.

        Returns:
            For each document: `index` in the list given, `score`, `document`.

        Raises:
            InvalidRequestError: the model gives no scores, or reads no instruction.
            ContextLengthError: a text is too long.
        """
        given = ScoreInput.of_query(query, documents, instruction, truncate)
        return ranked(documents, self._session.score(given), top_n)

    def score(
        self,
        a: str | Sequence[str],
        b: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: int | bool = False,
    ) -> "NDArray[np.float32]":
        """How well each text of `a` matches the text of `b` beside it.

        If one of both is a single text, it is compared with all texts of the other.

        Returns:
            (N,) float32. A reranker's scores are what its files say, mostly from 0 to 1. An
            embedding model's are the similarity of the vectors, mostly their cosine.

        Raises:
            The errors of `rerank`, and InvalidRequestError for different numbers of texts.
        """
        given = ScoreInput(first=a, second=b, instruction=instruction, truncate=truncate)
        return self._session.score(given)
