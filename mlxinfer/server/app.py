"""The ASGI app: one table of all routes, and the order in which a request is checked."""

import asyncio
import re
from collections.abc import Iterable, Set

from ..errors import OverloadedError
from . import guard, openapi, ops
from .apis import (
    anthropic,
    chat,
    completions,
    embeddings,
    kv,
    llama_cpp,
    models,
    ollama,
    responses,
    sessions,
    tokens,
)
from .apis.anthropic import ANTHROPIC
from .apis.ollama import OLLAMA
from .apis.responses import RESPONSES
from .call import Call
from .errors import HttpError
from .exchange import CLIENT_GONE
from .http import OPENAI, ClientGoneError, ErrorForm, Receive, Route, Scope, Send
from .page import files
from .service import ServerState

METRICS = "/metrics"
ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", chat.chat),
    Route("POST", "/v1/completions", completions.complete),
    Route("POST", "/completion", llama_cpp.complete_prompt),
    Route("POST", "/infill", llama_cpp.infill),
    Route("GET", "/props", llama_cpp.props),
    Route("POST", "/v1/responses", responses.responses),
    Route("POST", "/v1/responses/input_tokens", responses.input_tokens),
    Route("GET", "/v1/responses/{id}", responses.show_response),
    Route("DELETE", "/v1/responses/{id}", responses.delete_response),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel_response),
    Route("GET", "/v1/responses/{id}/input_items", responses.input_items),
    Route("POST", "/v1/messages", anthropic.messages),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/{name:path}", models.show_model),
    Route("GET", "/v1/sessions", sessions.list_sessions),
    Route("POST", "/v1/sessions", sessions.save_session),
    Route("PUT", "/v1/sessions", sessions.import_session, takes_file=True),
    Route("POST", "/v1/sessions/{id}/load", sessions.load_session),
    Route("GET", "/v1/sessions/{id}/file", sessions.export_session),
    Route("DELETE", "/v1/sessions/{id}", sessions.remove_session),
    Route("POST", "/tokenize", tokens.tokenize),
    Route("POST", "/detokenize", tokens.detokenize),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info),
    Route("POST", "/v1/embeddings", embeddings.embed),
    *(Route("POST", path, embeddings.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(Route("POST", path, embeddings.rerank) for path in ("/reranking", "/v1/reranking")),
    Route("POST", "/v1/score", embeddings.score),
    Route("POST", "/score", embeddings.score),
    Route("POST", "/api/chat", ollama.ollama_chat),
    Route("POST", "/api/generate", ollama.ollama_generate),
    Route("POST", "/api/embed", ollama.embed_texts),
    Route("POST", "/api/embeddings", ollama.embed_text),
    Route("GET", "/api/tags", ollama.tags),
    Route("GET", "/api/ps", ollama.running),
    Route("GET", "/api/version", ollama.ollama_version),
    Route("POST", "/api/show", ollama.show_details),
    Route("POST", "/api/pull", ollama.pull, "admin"),
    *(Route("GET", path, ops.health, "anyone") for path in ("/health", "/v1/health", "/ping")),
    Route("GET", "/version", ops.version),
    Route("GET", "/ready", ops.ready, "anyone"),
    Route("GET", "/server_info", ops.server_info),
    Route("GET", "/v1/reuse", ops.list_reuse),
    Route("GET", "/v1/reuse/{id}", ops.show_reuse),
    Route("GET", METRICS, ops.metrics, "admin"),
    Route("GET", "/v1/loads", ops.loads, "admin"),
    Route("GET", "/admin/models", ops.list_states, "admin"),
    Route("POST", "/admin/models/load", ops.load_model, "admin"),
    Route("POST", "/admin/models/unload", ops.unload_model, "admin"),
    Route("POST", "/admin/models/pin", ops.pin_model, "admin"),
    Route("POST", "/v1/load_lora_adapter", ops.load_adapter, "admin"),
    Route("POST", "/v1/unload_lora_adapter", ops.unload_adapter, "admin"),
    Route("GET", "/admin/state", ops.dashboard, "admin"),
    Route("POST", "/v1/kv/held", kv.held, "admin"),
    Route("POST", "/v1/kv/entries", kv.entries, "admin"),
    Route("POST", "/v1/kv/compute", kv.compute, "admin"),
)
FORMS = {  # by beginning: the first that fits
    "/v1/messages": ANTHROPIC,
    "/v1/responses": RESPONSES,
    "/api/": OLLAMA,
}
_PARAM = re.compile(r"\{(\w+)(:path)?\}")
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, PUT, DELETE, OPTIONS"),
    # SDKs send many headers of their own; `*` does not cover authorization
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
]


def form_of(path: str, headers: Set[bytes]) -> ErrorForm:
    """How errors of a path look; /v1/models has Anthropic's form too, for its clients."""
    if models.ANTHROPIC_VERSION in headers and path.startswith("/v1/models"):
        return ANTHROPIC
    return next((form for start, form in FORMS.items() if path.startswith(start)), OPENAI)


class App:
    """Finds the route of a request, checks the request, and answers it; errors become replies.

    Args:
        routes: no two of them with one method and path; those of the page's files are added,
            and one that describes them.
    """

    def __init__(self, service: ServerState, routes: Iterable[Route] = ROUTES) -> None:
        self._service = service
        self._exact: dict[str, dict[str, Route]] = {}  # path -> method -> route
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        routes = tuple(routes)
        for route in (*routes, openapi.route_of(routes), *files.ROUTES):
            if _PARAM.search(route.path):
                methods = self._patterns.setdefault(_pattern(route.path), {})
            else:
                methods = self._exact.setdefault(route.path, {})
            assert route.method not in methods, route.path
            methods[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and write its line of the access log."""
        if scope["type"] != "http":
            return
        guard.split_target(scope)
        scope["path"] = self._canonical(scope["path"])
        form = form_of(scope["path"], {name for name, _ in scope["headers"]})
        call = Call(self._service, scope, send, form)
        try:
            if problem := guard.framing_problem(scope, self._service.config):
                call.headers.append((b"connection", b"close"))
                raise problem
            if not await self._answer_preflight(call):
                await call.answer(self._admit(call), receive)
        except ClientGoneError:
            call.status = CLIENT_GONE
        except OverloadedError as error:
            await asyncio.sleep(call.hold_s)
            await call.fail(error)
        except Exception as error:  # the fault boundary of a request: it fails, the server goes on
            await call.fail(error)
        finally:
            call.write_log()

    async def _answer_preflight(self, call: Call) -> bool:
        """Answer a CORS preflight request; False: the request is none."""
        scope, config = call.scope, self._service.config
        asked = call.header(b"access-control-request-method") is not None
        if scope["method"] != "OPTIONS" or not asked:
            return False
        guard.check_host(scope, config)
        call.headers += guard.cors_headers(scope, config)
        await call.send({"type": "http.response.start", "status": 204, "headers": _PREFLIGHT})
        await call.send({"type": "http.response.body", "body": b""})
        return True

    def _admit(self, call: Call) -> Route:
        """The route of a request that may be answered; a path is not looked up without a key."""
        scope, config = call.scope, self._service.config
        guard.check_sizes(scope, config)
        guard.check_host(scope, config)
        methods, call.path_params = self._methods(scope["path"])
        route = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        access = "key" if route is None else route.access
        if scope["path"] == METRICS and guard.is_open_metrics(scope, config):
            access = "anyone"
        if access != "anyone":
            call.set_key(config.keys.key_of(scope["headers"]))
        if access == "admin":
            call.require_admin()
        if scope["method"] == "POST":
            guard.check_media_type(scope["headers"])
        if not methods:
            raise HttpError("not_found", "Nothing is served at this path.")
        if route is None:
            raise HttpError("method_not_allowed", "This path is there, but not for this method.")
        call.headers += guard.cors_headers(scope, config)
        return route

    def _methods(self, path: str) -> tuple[dict[str, Route], dict[str, str]]:
        if path in self._exact:
            return self._exact[path], {}
        for pattern, methods in self._patterns.items():
            if match := pattern.fullmatch(path):
                return methods, match.groupdict()
        return {}, {}

    def _canonical(self, path: str) -> str:
        """The path under /v1 that a client means: with one /v1, and without a trailing slash.

        Clients differ in whether their base URL ends with /v1. Other paths stay as they are.
        """
        if self._methods(path)[0] and not path.endswith("/"):
            return path
        plain = path.rstrip("/")
        for meant in (plain.removeprefix("/v1"), plain, f"/v1{plain}"):
            if meant.startswith("/v1/") and self._methods(meant)[0]:
                return meant
        return path


def _pattern(path: str) -> re.Pattern[str]:
    parts = _PARAM.split(path)  # text, name, ":path" or None, text, …
    expression = re.escape(parts[0])
    for name, slashes, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        expression += f"(?P<{name}>{'.+' if slashes else '[^/]+'}){re.escape(text)}"
    return re.compile(expression)
