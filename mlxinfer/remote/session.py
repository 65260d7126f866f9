"""A model behind a server: the interface of a session, over HTTP.

The parts of an engine in this process (tokenizer, logits, pinned prefixes) are refused by name.
"""

import base64
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote, urlsplit

from ..core import SamplingParams
from ..errors import EngineClosedError, InvalidRequestError, ServerError, SilentServerError
from ..http_json import client_options, failures, parsed, reading
from ..outputs import Result
from ..progress import Watch, unwatched
from ..session.answers import AnswerStep
from ..session.base import ModelSession
from ..session.inputs import EmbedInput, EncodedPrompt, Input, ScoreInput
from .answer import RemoteAnswer, error_of
from .request import RemoteRequests, Request, TokenizeRequests

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

API_KEY = "MLXINFER_API_KEY"  # environment variable
ASK_S = 30.0  # that a server may take to say what it is
POLL_S = 1.0  # between two looks at how far a model is loaded
PARALLEL = 64  # requests of one batch at once
if sys.platform == "darwin":
    _IDLE = socket.TCP_KEEPALIVE
else:
    _IDLE = socket.TCP_KEEPIDLE
# An answer may take any time, and a machine without power or network never says that it has gone.
# So the system asks it after 30 seconds of silence, and gives up after a minute.
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, _IDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteInfo:
    """The facts of a model that its server tells."""

    name: str
    url: str
    max_context: int | None  # tokens
    vocab_size: int | None
    sees: bool  # it reads pictures
    chats: bool
    thinking: tuple[str, ...]  # what its template can be told

    @classmethod
    def of(cls, url: str, card: Mapping[str, Any]) -> "RemoteInfo":
        """The facts of a model's entry in /v1/models; those of other servers say less."""
        able = card.get("capabilities") or {}
        return cls(
            name=card["id"],
            url=url,
            max_context=card.get("max_model_len"),
            vocab_size=card.get("vocab_size"),
            sees=able.get("vision", False),
            chats=able.get("chat", False),
            thinking=tuple(card.get("thinking") or ()),
        )

    @property
    def summary(self) -> str:
        return f"at {self.url}"


_REASONS = {  # why a server's model has no such part
    "pin": "a server keeps prefixes for all its clients by their use",
    "logits": "a server gives tokens, not logits",
    "chat_params": "the server does not say them",
    "path": "the files are the server's",
    "tokenizer": "it is the server's; POST /tokenize asks it",
    "end_ids": "they are the server's",
}


class RemoteSession(ModelSession):
    """One model of a server.

    Args:
        url: of the server, with or without /v1.
        api_key: None: MLXINFER_API_KEY.
        served_model: name or alias; None: the first.
        watch: is called with the bytes of weights that the server has loaded, and of all.

    Raises:
        InvalidRequestError: no address.
        ServerError: no server answers there, it refused, or it has no such model.
    """

    def __init__(
        self, url: str, api_key: str | None, served_model: str | None, watch: Watch = unwatched
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not urlsplit(self._url).hostname:
            raise InvalidRequestError(f"{url} is no address; one looks like http://host:8080.")
        key = api_key or os.environ.get(API_KEY)
        self._key = key
        self._closed = False
        card = _chosen(self._url, self.ask("/v1/models", timeout_s=ASK_S), served_model)
        if card.get("capabilities", {}) is None:
            card = self._loaded(card["id"], watch)
        self.info = RemoteInfo.of(self._url, card)
        if card.get("chat_sampling"):
            self.chat_params = SamplingParams(max_tokens=None, **card["chat_sampling"])

    def _loaded(self, name: str, watch: Watch) -> dict[str, Any]:
        path = f"/v1/models/{quote(name, safe='')}"
        while True:
            try:
                self.ask("/api/show", {"model": name}, timeout_s=POLL_S)
            except SilentServerError:  # the load goes on
                progress = self.ask(path, timeout_s=ASK_S).get("load_progress")
                if progress is not None:
                    watch(progress["loaded_bytes"], progress["total_bytes"])
            else:
                return dict(self.ask(path, timeout_s=ASK_S))

    def start(self, *inputs: Input) -> "RemoteAnswers":
        """The answers to conversations and texts; nothing is sent before they are read."""
        requests = RemoteRequests(self.info.name, self.chat_params)
        return RemoteAnswers(self, list(map(requests.request_of, inputs)))

    def encode(self, given: Input, *, bounded: bool = True) -> EncodedPrompt:
        path, body = TokenizeRequests(self.info.name, self.chat_params).request_of(given)
        return EncodedPrompt(self.ask(path, body)["tokens"])

    # -- vectors and scores ---------------------------------------------------------------------

    def embed(self, given: EmbedInput) -> "NDArray[np.float32]":
        """Vectors (N, dim) of texts."""
        import numpy as np

        body = {
            "input": given.texts,
            "encoding_format": "base64",
            "prompt_name": given.prompt_name,
            "prompt": given.prompt,
            "dimensions": given.dimensions,
            "normalize": given.normalize,
        }
        data = self._pooled("/v1/embeddings", body, given.truncate)
        rows = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data]
        return np.stack(rows).astype(np.float32)

    def score(self, given: ScoreInput) -> "NDArray[np.float32]":
        """Scores (N,) of pairs."""
        import numpy as np

        body = {"text_1": given.first, "text_2": given.second, "instruction": given.instruction}
        data = self._pooled("/v1/score", body, given.truncate)
        return np.array([entry["score"] for entry in data], np.float32)

    def _pooled(self, path: str, body: dict[str, Any], truncate: int | bool) -> Any:
        key = "truncate" if isinstance(truncate, bool) else "truncate_prompt_tokens"
        said = {name: value for name, value in body.items() if value is not None}
        return self.ask(path, {"model": self.info.name, **said, key: truncate})["data"]

    def ask(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """The JSON that the server answers; None as a body: GET. No limit of time: None."""
        import httpx2

        method = "GET" if body is None else "POST"
        options = self.options(httpx2.HTTPTransport, timeout_s)
        with failures(self._url), httpx2.Client(**options) as client:
            response = client.request(method, path, json=body)
        if response.status_code != 200:
            raise _refusal(response.status_code, response.content)
        return parsed(self._url, response.content)

    # -- what it knows --------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        reply = self.ask("/admin/models", timeout_s=ASK_S)
        models = [model for model in reply["models"] if model["name"] == self.info.name]
        return dict(models[0]) if models else {}

    def close(self) -> None:
        """Ask no more; the server goes on."""
        self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Let the server load an adapter: `path` is the server's, in a folder of --adapter-dir."""
        body = {"lora_name": name, "lora_path": str(path), "base_model_name": self.info.name}
        self.ask("/v1/load_lora_adapter", body)

    def unload_adapter(self, name: str) -> None:
        body = {"lora_name": name, "base_model_name": self.info.name}
        self.ask("/v1/unload_lora_adapter", body)

    def adapters(self) -> list[dict[str, Any]]:
        cards = self.ask("/v1/models", timeout_s=ASK_S)["data"]
        mine = [card["id"] for card in cards if card.get("parent") == self.info.name]
        return [{"name": name.removeprefix(f"{self.info.name}:")} for name in mine]

    def refuse(self, method: str) -> NoReturn:
        """Raise InvalidRequestError: only an engine in this process has the method."""
        raise InvalidRequestError(
            f"{method} is not there for the model at {self._url}: {_REASONS[method]}.", param=method
        )

    def options(
        self, transport: Callable[..., Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The options of an HTTP client over a transport; answers may take long (timeout None)."""
        import httpx2

        if self.closed:
            raise EngineClosedError("This LLM is closed; build a new one.")
        timeout = httpx2.Timeout(ASK_S, read=timeout_s)
        options = client_options(self._url, self._key)
        over = transport(verify=options["verify"], trust_env=False, socket_options=KEEP_ALIVE)
        return {**options, "timeout": timeout, "transport": over}


def connect(
    url: str,
    api_key: str | None,
    served_model: str | None,
    options: Mapping[str, Any],
    watch: Watch = unwatched,
) -> RemoteSession:
    """A server's model; raises InvalidRequestError for options of an engine."""
    if options:
        raise InvalidRequestError(
            f"{', '.join(options)}: the server at {url} chose its engine's options when it was "
            "started (`mlxinfer serve --help`); leave these out.",
            param=next(iter(options)),
        )
    return RemoteSession(url, api_key, served_model, watch)


class RemoteAnswers:
    """Answers of a server, each to a request of its own.

    Iterating reads one answer after the other; `results` waits for all at once.
    """

    def __init__(self, session: RemoteSession, requests: Sequence[Request]) -> None:
        self._session, self._requests = session, requests

    def __iter__(self) -> Iterator[list[AnswerStep]]:
        for index in range(len(self._requests)):
            yield from self._steps(index)

    def _steps(self, index: int) -> Iterator[list[AnswerStep]]:
        """The steps of one answer; leaving the loop hangs up, which ends it at the server."""
        import httpx2

        answer, (path, body) = RemoteAnswer(index), self._requests[index]
        with (
            failures(self._session.info.url),
            httpx2.Client(**self._session.options(httpx2.HTTPTransport)) as client,
            client.stream("POST", path, json=body) as response,
        ):
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read())
            with reading(self._session.info.url):
                for data in response.iter_bytes():
                    for step in answer.push(data):
                        yield [step]
        yield [answer.finish()]

    async def __aiter__(self) -> AsyncIterator[list[AnswerStep]]:
        import httpx2

        for index, (path, body) in enumerate(self._requests):
            answer, options = RemoteAnswer(index), self._session.options(httpx2.AsyncHTTPTransport)
            with failures(self._session.info.url):
                async with (
                    httpx2.AsyncClient(**options) as client,
                    client.stream("POST", path, json=body) as response,
                ):
                    if response.status_code != 200:
                        raise _refusal(response.status_code, await response.aread())
                    with reading(self._session.info.url):
                        async for data in response.aiter_bytes():
                            for step in answer.push(data):
                                yield [step]
            yield [answer.finish()]

    def results(self, watch: Callable[[Result], None] | None = None) -> list[Result]:
        """Wait for all answers; the first error, or Ctrl-C, ends the others."""
        is_over = False

        def one(index: int) -> Result:
            result = None
            for (step,) in self._steps(index):
                if is_over:
                    raise CancelledError
                result = step.delta.result
            assert result is not None
            if watch is not None:
                watch(result)
            return result

        count = len(self._requests)
        if count == 1:
            return [one(0)]
        with ThreadPoolExecutor(min(PARALLEL, count or 1)) as pool:
            running = [pool.submit(one, index) for index in range(count)]
            try:
                for future in as_completed(running):
                    future.result()
            finally:
                is_over = True
                pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in running]


def _chosen(url: str, reply: Any, name: str | None) -> dict[str, Any]:
    try:
        models = {entry["id"]: entry for entry in reply["data"]}
        names = {alias: m for m in models.values() for alias in m.get("aliases") or ()} | models
    except (KeyError, TypeError):
        raise ServerError(f"What answers at {url} is no server of models.") from None
    if not models or (name is not None and name not in names):
        said = f"has no model {name!r}; it has {', '.join(models)}" if models else "has no model"
        raise ServerError(f"The server at {url} {said}.")
    return dict(next(iter(models.values())) if name is None else names[name])


def _refusal(status: int, body: bytes) -> Exception:
    import json

    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        said = {"message": f"The server answered with status {status}."}
    return error_of(said, status)
