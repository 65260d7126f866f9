"""Sockets, signals and shutdown of a server: uvicorn around the app."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from types import FrameType
from typing import Any

import uvicorn

from ..errors import InvalidRequestError
from .app import ROUTES, App
from .config import ServerConfig
from .http import AsgiApp, Route
from .protocol import TimedProtocol
from .service import ServerState

log = logging.getLogger("mlxinfer.server")

OTHER_FILES = 128  # of the limit: weights, disk caches, pipes
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Server(uvicorn.Server):
    """Serves until `stop()`, SIGTERM or SIGINT, which drain it; a second signal ends requests.

    Args:
        on_ready: called once clients can connect.
    """

    def __init__(
        self,
        service: ServerState,
        listeners: Sequence[socket.socket],
        on_ready: Callable[[], None] = lambda: None,
        routes: Iterable[Route] = ROUTES,
    ) -> None:
        config = service.config
        limits = {
            "header_timeout_s": config.header_timeout_s,
            "max_per_client": config.max_connections_per_client,
            "max_open": max_open_connections(),
        }
        super().__init__(
            uvicorn.Config(
                traced(App(service, routes)),
                http=type("LimitedProtocol", (TimedProtocol,), limits),
                loop="asyncio",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=config.max_connections,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=3,
                h11_max_incomplete_event_size=config.max_header_bytes,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self.service = service
        self._listeners = list(listeners)
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._tending: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._num_signals = 0

    def serve_forever(self) -> None:
        """Serve in this thread until stopped, then close the models.

        Raises:
            ModelError and others: a pinned or preloaded model cannot be loaded.
            DeviceLostError: the GPU takes no more work from this process.
        """
        try:
            with self.service.problems.kept(), asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._loop.set_exception_handler(LoopErrors())
                runner.run(self.serve(sockets=self._listeners))
        finally:
            self.service.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_draining)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; requests wait for models that are still loading."""
        await super().startup(sockets)
        self._tending = asyncio.create_task(self.service.models.tend(self._on_ready))
        self._tending.add_done_callback(self._tended)

    def _tended(self, tending: asyncio.Task[None]) -> None:
        """End with the error of a model that has to be there; serve_forever raises it."""
        if not tending.cancelled():
            self._failure = tending.exception()
            self.should_exit = True

    def _begin_draining(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        if num_running := len(self.service.calls):
            log.info(
                "ending: %d running %s at most %g seconds; a second signal ends them",
                num_running,
                "request has" if num_running == 1 else "requests have",
                self.service.config.drain_s,
            )
        await self.service.drain()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while serving; uvicorn would raise them again at exit."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end requests with errors at the second, exit at the third."""
        self._num_signals += 1
        if self._num_signals > 2:
            os._exit(128 + sig)
        if self._num_signals == 2 and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.service.hurry)
        self.stop()


def max_open_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(soft - OTHER_FILES, soft // 2)


class LoopErrors:
    """Logs errors that the event loop reports; a lack of file descriptors once a minute.

    asyncio reports that for each connection that it cannot accept, thousands of times a second.
    """

    def __init__(self) -> None:
        self._silent_until_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._silent_until_s:
            self._silent_until_s = time.monotonic() + 60
            log.error("no file descriptor is left for a new connection; raise `ulimit -n`")


def traced(app: AsgiApp) -> AsgiApp:
    """Add a span of OpenTelemetry for each request, where its environment names a collector.

    The variables are OpenTelemetry's: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
    """
    if not any(os.environ.get(name) for name in OTLP_ENDPOINTS):
        return app
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning('no traces are sent: pip install -e ".[otel]" in a checkout of mlxinfer first')
        return app
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetryMiddleware(app, exclude_spans=["receive", "send"], tracer_provider=provider)


def bind(config: ServerConfig) -> list[socket.socket]:
    """Sockets bound to the config's addresses; of port 0 all take the one that the first finds."""
    bound: list[socket.socket] = []
    try:
        for host in config.hosts:
            port = bound[0].getsockname()[1] if bound else config.port
            bound.append(_bind(host, port, alone=len(config.hosts) == 1))
    except InvalidRequestError:
        for listener in bound:
            listener.close()
        raise
    return bound


def _bind(host: str, port: int, *, alone: bool) -> socket.socket:
    plain = host.strip("[]")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named; without it a response of two writes
    # waits for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6 and not alone:  # else :: would take the IPv4 port as well
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listener.bind((plain, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequestError(
            f"Cannot serve on {host} port {port}: {reason}. "
            "Choose another with --port, or end what uses this one.",
            param="port",
        ) from None
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_tls(config: ServerConfig) -> None:
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_cert,
            config.tls_key,
            password=lambda: "",  # OpenSSL would ask for one on the terminal
        )
    except OSError as error:  # SSLError is one
        raise InvalidRequestError(
            f"--tls-cert {config.tls_cert} with --tls-key {config.tls_key}: "
            f"{error.strerror or error}. Expected a certificate chain and its key, without a "
            "password, both PEM.",
            param="tls_cert",
        ) from None
