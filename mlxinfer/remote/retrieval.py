"""Vectors and scores of a server's model: the methods of a pooling session, over HTTP."""

import base64
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..outputs import Ranked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ask = Callable[[str, dict[str, Any]], Any]  # path and body -> the JSON of the answer


class RemoteRetrieval:
    """What RemoteSession has of LLM's embed, rerank and score.

    Args:
        model: its name at the server.
        ask: posts a body.
    """

    def __init__(self, model: str, ask: Ask) -> None:
        self._model = model
        self._ask = ask

    def embed(
        self, texts: Any, *, truncate: int | bool = False, **options: Any
    ) -> "NDArray[np.float32]":
        """Vectors (N, dim); arguments as of LLM.embed."""
        import numpy as np

        body = {"input": texts, "encoding_format": "base64", **_given(options), **_cut(truncate)}
        data = self._post("/v1/embeddings", body)["data"]
        rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data]
        return np.stack(rows).astype(np.float32)

    def rerank(
        self, query: str, documents: Sequence[str], *, truncate: int | bool = False, **options: Any
    ) -> list[Ranked]:
        """Documents by their scores; arguments as of LLM.rerank."""
        body = {"query": query, "documents": list(documents), "return_documents": False}
        results = self._post("/v1/rerank", {**body, **_given(options), **_cut(truncate)})["results"]
        return [
            Ranked(each["index"], each["relevance_score"], documents[each["index"]])
            for each in results
        ]

    def score(
        self, a: Any, b: Any, *, truncate: int | bool = False, **options: Any
    ) -> "NDArray[np.float32]":
        """Scores (N,); arguments as of LLM.score."""
        import numpy as np

        body = {"text_1": a, "text_2": b, **_given(options), **_cut(truncate)}
        data = self._post("/v1/score", body)["data"]
        return np.array([each["score"] for each in data], np.float32)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask(path, {"model": self._model, **body})


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _cut(truncate: int | bool) -> dict[str, Any]:
    """A request's fields for what LLM calls `truncate`."""
    if isinstance(truncate, bool):
        return {"truncate": truncate}
    return {"truncate_prompt_tokens": truncate}
