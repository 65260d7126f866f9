"""A server in a thread, real sockets, and what must hold after each test."""

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx2 as httpx

from mlxinfer import hub
from mlxinfer.core import TokenEvent
from mlxinfer.server.app import ROUTES
from mlxinfer.server.config import ServerConfig
from mlxinfer.server.http import Route
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.run import Server, bind, url_of
from mlxinfer.server.service import ServerState
from mlxinfer.server.slots import RegistryEntry, ServedModel
from mlxinfer.server.store import ResponseStore
from mlxinfer.session.options import EngineOptions
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
ANNA_AND_BOB = ApiKeys().with_named({"anna": {"key": "a"}, "bob": {"key": "b"}}, "keys")
LONG_TOKENS = 1800
LONG_TOKEN_S = 0.01  # the least that each of so many tokens takes


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A chat request, greedy and short unless told otherwise."""
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": 8, **fields}


def long_chat(**fields: Any) -> dict[str, Any]:
    """One that goes on until it is ended: longer than any test waits, on any machine."""
    return chat("Count", ignore_eos=True, max_tokens=LONG_TOKENS, **fields)


def models_of(served: Sequence[ServedModel]) -> ModelRegistry:
    """Models that are loaded already, and stay."""
    entries = [
        RegistryEntry(
            name=model.name,
            load=lambda _, model=model: model,  # type: ignore[misc]  # bound in its round
            kv_bytes=0,
            pinned=True,
            created_s=model.created_s,
        )
        for model in served
    ]
    models = ModelRegistry(
        entries, limit_bytes=sum(model.session.info.weights_bytes for model in served)
    )
    for slot, model in zip(models.slots(), served, strict=True):
        models._take_in(slot, model)
    models.started = True
    return models


def in_no_hurry(model: ServedModel) -> ServedModel:
    """The same model, which takes its time where an answer may be long."""
    loop: Any = model.session.engine._loop
    emit = loop._emit

    def emit_slowly(events: list[TokenEvent]) -> None:
        for event in events:
            emit([event])
            sequence = loop.scheduler.queues.find(event.request_id)
            if sequence is not None and sequence.max_known - sequence.num_prompt >= LONG_TOKENS:
                time.sleep(LONG_TOKEN_S)

    loop._emit = emit_slowly
    return model


class LiveServer:
    """A bundled model behind a real socket, under the name `demo`.

    Args:
        engine: arguments of EngineOptions.
        send_buffer: bytes that the kernel keeps for a client that does not read.
        store: of responses.
        bundled: the model that `demo` stands for.
        config: of ServerConfig.
    """

    routes_served: tuple[Route, ...] = ROUTES

    def __init__(
        self,
        engine: dict[str, Any] | None = None,
        send_buffer: int | None = None,
        store: ResponseStore | None = None,
        bundled: str = "demo-draft",
        **config: Any,
    ) -> None:
        options = EngineOptions(**{"max_batch": 16, **(engine or {})})
        model = ServedModel.open("demo", hub.resolve(bundled), options, created_s=1)
        self.model = in_no_hurry(model)
        self.listen(models_of([self.model]), send_buffer, store, **config)

    def listen(
        self,
        models: ModelRegistry,
        send_buffer: int | None = None,
        store: ResponseStore | None = None,
        **config: Any,
    ) -> None:
        """Put a socket before these models."""
        self.config = ServerConfig(port=0, **config)
        self.service = ServerState(models, self.config, store)
        listeners = bind(self.config)
        if send_buffer is not None:  # connections inherit it
            listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.url = url_of(listeners[0], tls=self.config.tls_cert is not None)
        self.port: int = listeners[0].getsockname()[1]
        self.server = Server(self.service, listeners, routes=self.routes_served)
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._ahead_s = 0.0  # of the event loop's clock

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.server.started)
        cafile = self.config.tls_cert  # without one there is nothing to verify, or to read
        verify = cafile is not None and ssl.create_default_context(cafile=cafile)
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=verify)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def loop_thread(self) -> int | None:
        """The identity of the event loop's thread."""
        return self._thread.ident

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def answer(self, path: str, body: Any, **kwargs: Any) -> Any:
        """The JSON of an answer with status 200."""
        reply = self.post(path, body, **kwargs)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.client.get(path, **kwargs)

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[httpx.Response]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            yield response

    def events(self, path: str, body: Any) -> list[Any]:
        """The data of every event of a stream; the last one may be the string [DONE]."""
        with self.stream(path, body) as response:
            assert response.status_code == 200, response.read()
            return list(events_of(response))

    def move_clock(self, seconds: float) -> None:
        """Let so much time pass for the server's event loop; it never goes back."""
        loop = self.server._loop
        assert loop is not None
        self._ahead_s += seconds
        vars(loop)["time"] = lambda: time.monotonic() + self._ahead_s
        loop.call_soon_threadsafe(lambda: None)  # it looks at its clock

    def connections(self) -> int:
        """How many are open, those of our own client included."""
        return len(self.server.server_state.connections)

    def stats(self) -> dict[str, Any]:
        return self.model.session.engine.stats()

    def is_idle(self) -> bool:
        """Nothing runs, waits or is held but for cached pages."""
        stats = self.stats()
        held = sum(group["pages_held"] for group in stats["groups"])
        return (
            not self.service.calls
            and self.service.admission.num_waiting == 0
            and (stats["running"], stats["waiting"], held) == (0, 0, 0)
        )

    def check_idle(self) -> None:
        """It comes to rest, and answers as it always does."""
        wait_until(self.is_idle)
        answer = self.answer(CHAT, chat("Hello", max_tokens=4))
        assert answer["choices"][0]["message"]["content"] == "Hello! I am"
        wait_until(self.is_idle)


class SeveralServer(LiveServer):
    """Models behind one socket, by their names; the first is `model`.

    Args:
        folders: of the models.
        engine: arguments of EngineOptions, for those that need others.
        config: as `listen` takes it.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        engine: dict[str, dict[str, Any]] | None = None,
        **config: Any,
    ) -> None:
        self.by_name: dict[str, ServedModel] = {}
        for name, folder in folders.items():
            options = EngineOptions(**(engine or {}).get(name, {"max_batch": 4}))
            self.by_name[name] = ServedModel.open(name, folder, options, created_s=1)
        self.model, *_ = served = [*self.by_name.values()]
        self.listen(models_of(served), **config)


@contextmanager
def access_log() -> Iterator[list[logging.LogRecord]]:
    """Records of the access log from now on."""
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[assignment, method-assign]
    logger = logging.getLogger("mlxinfer.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def num_threads() -> int:
    """Of this process, but for those that render and encode: they are made as they are needed."""
    return sum(not t.name.startswith("mlxinfer-text") for t in threading.enumerate())


def events_of(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
