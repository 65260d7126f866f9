"""A model behind a server as LLM sees it: the methods of `session.Session`, over HTTP.

What only an engine in this process has (its tokenizer, logits, pinned prefixes) is refused by name.
"""

import base64
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..core import SamplingParams
from ..errors import EngineClosedError, InvalidRequestError
from ..http_json import NoServerError, ServerError, exchange
from ..outputs import Delta, Ranked, Result
from .answer import RemoteAnswer, error_of
from .request import RemoteRequest, chat_request, text_request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

API_KEY = "MLXINFER_API_KEY"  # environment variable
ASK_S = 30.0  # that a server may take to say what it is
PARALLEL = 64  # requests of one batch at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteInfo:
    """What a server says of a model."""

    name: str
    url: str
    max_context: int | None  # tokens; None: the model has not been loaded yet

    @property
    def summary(self) -> str:
        """One short line."""
        return f"at {self.url}"


class RemoteSession:
    """One model of a server.

    Args:
        url: of the server, with or without /v1.
        api_key: None: MLXINFER_API_KEY.
        served_model: name or alias; None: the first.

    Attributes:
        info: what the server says of the model.

    Raises:
        InvalidRequestError: no address.
        ServerError: no server answers there, it refused, or it has no such model.
    """

    def __init__(self, url: str, api_key: str | None, served_model: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not urlsplit(self._url).hostname:
            raise InvalidRequestError(f"{url} is no address; one looks like http://host:8080.")
        key = api_key or os.environ.get(API_KEY)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        found = exchange(self._url, "/v1/models", None, key=key, timeout_s=ASK_S)
        self.info = _chosen(self._url, found, served_model)
        self.closed = False

    # -- requests -------------------------------------------------------------------------------

    def prompt(
        self, prompt: Any, params: Any, form: Any, adapter: str | None = None
    ) -> RemoteRequest:
        """A request to continue one prompt."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("expected params=SamplingParams(...).", param="params")
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise InvalidRequestError("A prompt is a text or a list of token ids.", param="prompt")
        return text_request(self._name(adapter), prompt, params, form)

    def prompts(
        self, prompts: Any, params: Any, response_format: Any, adapter: Any = None
    ) -> list[RemoteRequest]:
        """Requests to continue one prompt or many."""
        one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        every = [prompts] if one else list(prompts)
        given = [params, response_format, adapter]
        each = [one if isinstance(one, list | tuple) else [one] * len(every) for one in given]
        if any(len(one) != len(every) for one in each):
            counts = "{} params, {} forms and {} adapters".format(*map(len, each))
            raise InvalidRequestError(
                f"There are {len(every)} prompts, {counts}; give one for all, or one each."
            )
        return [self.prompt(*one) for one in zip(every, *each, strict=True)]

    def chat(
        self,
        messages: Any,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        adapter: str | None = None,
        **options: Any,
    ) -> RemoteRequest:
        """A request to answer a conversation."""
        values = sampling
        if params is not None:
            changed = params.changed(sampling)
            values = {name: getattr(changed, name) for name in SamplingParams.__slots__}
        return chat_request(self._name(adapter), messages, values, **options)

    def _name(self, adapter: str | None) -> str:
        """The model's name with an adapter's."""
        return self.info.name if adapter is None else f"{self.info.name}:{adapter}"

    def run(
        self, built: Sequence[RemoteRequest], watch: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Run requests together to their ends; the first error is raised, the others go on."""

        def one(request: RemoteRequest) -> Result:
            result = None
            for delta in self.stream(request, None):
                result = delta.result
            assert result is not None
            if watch is not None:
                watch(result)
            return result

        if len(built) == 1:
            return [one(built[0])]
        with ThreadPoolExecutor(min(PARALLEL, len(built) or 1)) as pool:
            return list(pool.map(one, built))

    def stream(self, built: RemoteRequest, owner: object) -> Iterator[Delta]:
        """The deltas of one request; leaving the loop hangs up, which ends it at the server."""
        import httpx2

        answer = RemoteAnswer()
        with (
            self._failures(),
            httpx2.Client(**self._options()) as client,
            client.stream("POST", built.path, json=built.body) as response,
        ):
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read())
            for line in response.iter_lines():
                if (delta := answer.push(line)) is not None:
                    yield delta
        yield answer.finish()

    async def astream(self, built: RemoteRequest) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        import httpx2

        answer = RemoteAnswer()
        with self._failures():
            async with (
                httpx2.AsyncClient(**self._options()) as client,
                client.stream("POST", built.path, json=built.body) as response,
            ):
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if (delta := answer.push(line)) is not None:
                        yield delta
        yield answer.finish()

    # -- vectors and scores ---------------------------------------------------------------------

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
        """The JSON of what the model gives for `body`."""
        import httpx2

        with self._failures(), httpx2.Client(**self._options()) as client:
            response = client.post(path, json={"model": self.info.name, **body})
        if response.status_code != 200:
            raise _refusal(response.status_code, response.content)
        return response.json()

    # -- what it knows --------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the server says of the model and its memory."""
        found = self._exchange("/admin/models", None)
        models = [each for each in found["models"] if each["name"] == self.info.name]
        return dict(models[0]) if models else {}

    def close(self) -> None:
        """Ask no more; the server goes on."""
        self.closed = True

    def pin(self, prompt: object) -> int:
        """Refused."""
        raise self._refused("pin", "a server keeps prefixes for all its clients by their use")

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Let the server load an adapter: `path` is the server's, in a folder of --adapter-dir."""
        body = {"lora_name": name, "lora_path": str(path), "base_model_name": self.info.name}
        self._exchange("/v1/load_lora_adapter", body)

    def unload_adapter(self, name: str) -> None:
        """Let the server unload an adapter."""
        body = {"lora_name": name, "base_model_name": self.info.name}
        self._exchange("/v1/unload_lora_adapter", body)

    def adapters(self) -> list[dict[str, Any]]:
        """The names of the server's adapters of the model."""
        cards = self._exchange("/v1/models", None)["data"]
        mine = [card["id"] for card in cards if card.get("parent") == self.info.name]
        return [{"name": each.removeprefix(f"{self.info.name}:")} for each in mine]

    def _exchange(self, path: str, body: dict[str, Any] | None) -> Any:
        key = self._headers.get("authorization", "").removeprefix("Bearer ")
        return exchange(self._url, path, body, key=key or None, timeout_s=ASK_S)

    def logits(self, prompt: object, adapter: str | None = None) -> Any:
        """Refused."""
        raise self._refused("logits", "a server gives tokens, not logits")

    @property
    def chat_params(self) -> SamplingParams:
        """Refused."""
        raise self._refused("chat_params", "the server has them, and uses them")

    @property
    def path(self) -> Path:
        """Refused."""
        raise self._refused("path", "the files are the server's")

    @property
    def tokenizer(self) -> Any:
        """Refused."""
        raise self._refused("tokenizer", "it is the server's; POST /tokenize asks it")

    @property
    def end_ids(self) -> frozenset[int]:
        """Refused."""
        raise self._refused("end_ids", "they are the server's")

    def _refused(self, name: str, reason: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{name} is not there for the model at {self._url}: {reason}.", param=name
        )

    def _options(self) -> dict[str, Any]:
        """Of a client: answers may be long in coming, and the key goes to this server alone."""
        import httpx2

        if self.closed:
            raise EngineClosedError("This LLM is closed; build a new one.")
        return {
            "base_url": self._url,
            "headers": self._headers,
            "timeout": httpx2.Timeout(ASK_S, read=None),
            "trust_env": False,
            "follow_redirects": False,
        }

    @contextmanager
    def _failures(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except httpx2.ConnectError as error:
            raise NoServerError(f"No server answers at {self._url}: {error}.") from None
        except httpx2.HTTPError as error:
            raise ServerError(f"The connection to {self._url} broke: {error}.") from None


def _chosen(url: str, found: Any, name: str | None) -> RemoteInfo:
    """The model of this name or alias, or the first."""
    try:
        models = {each["id"]: each for each in found["data"]}
        names = {alias: m for m in models.values() for alias in m.get("aliases") or ()} | models
    except (KeyError, TypeError):
        raise ServerError(f"What answers at {url} is no server of models.") from None
    if not models or (name is not None and name not in names):
        said = f"has no model {name!r}; it has {', '.join(models)}" if models else "has no model"
        raise ServerError(f"The server at {url} {said}.")
    model = next(iter(models.values())) if name is None else names[name]
    return RemoteInfo(name=model["id"], url=url, max_context=model.get("max_model_len"))


def _refusal(status: int, body: bytes) -> Exception:
    import json

    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        said = {"message": f"The server answered with status {status}."}
    return error_of(said, status)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _cut(truncate: int | bool) -> dict[str, Any]:
    """A request's fields for what LLM calls `truncate`."""
    if isinstance(truncate, bool):
        return {"truncate": truncate}
    return {"truncate_prompt_tokens": truncate}
