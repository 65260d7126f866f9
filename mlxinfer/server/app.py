"""The ASGI app: one table of all routes, behind the guard."""

from collections.abc import Iterable, Set

from . import ops
from .apis import (
    anthropic,
    chat,
    completions,
    embeddings,
    models,
    ollama,
    responses,
    tokens,
)
from .apis.anthropic import ANTHROPIC
from .apis.ollama import OLLAMA
from .apis.responses import RESPONSES
from .call import answer_call
from .guard import Guard
from .http import OPENAI, App, ErrorForm, Receive, Route, RouteTable, Scope, Send
from .openapi import documentation
from .page import files
from .service import ServerState

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", chat.chat),
    Route("POST", "/v1/chat/completions/input_tokens", chat.chat_input_tokens),
    Route("POST", "/v1/completions", completions.complete),
    Route("POST", "/infill", completions.infill),
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
    Route("POST", "/tokenize", tokens.tokenize),
    Route("POST", "/detokenize", tokens.detokenize),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info),
    Route("POST", "/v1/embeddings", embeddings.embed),
    Route("POST", "/v1/rerank", embeddings.rerank),
    Route("POST", "/v2/rerank", embeddings.rerank),
    Route("POST", "/rerank", embeddings.rerank),
    Route("POST", "/v1/reranking", embeddings.rerank),
    Route("POST", "/reranking", embeddings.rerank),
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
    Route("GET", "/health", ops.health, "anyone"),
    Route("GET", "/ready", ops.ready, "anyone"),
    Route("GET", "/server_info", ops.server_info),
    Route("GET", "/metrics", ops.metrics, "admin"),
    Route("GET", "/v1/loads", ops.loads, "admin"),
    Route("GET", "/admin/models", ops.list_states, "admin"),
    Route("POST", "/admin/models/load", ops.load_model, "admin"),
    Route("POST", "/admin/models/unload", ops.unload_model, "admin"),
    Route("POST", "/admin/models/pin", ops.pin_model, "admin"),
    Route("POST", "/v1/load_lora_adapter", ops.load_adapter, "admin"),
    Route("POST", "/v1/unload_lora_adapter", ops.unload_adapter, "admin"),
    Route("GET", "/admin/state", ops.dashboard, "admin"),
)
FORMS = {"/v1/messages": ANTHROPIC, "/v1/responses": RESPONSES, "/api/": OLLAMA}  # by beginning


def form_of(path: str, headers: Set[bytes]) -> ErrorForm:
    """How errors of a path look; /v1/models has Anthropic's form too, for its clients."""
    if models.ANTHROPIC_VERSION in headers and path.startswith("/v1/models"):
        return ANTHROPIC
    return next((form for start, form in FORMS.items() if path.startswith(start)), OPENAI)


def build_app(service: ServerState, routes: Iterable[Route] = ROUTES) -> App:
    """The ASGI app of a service."""
    listed = tuple(routes)
    table = RouteTable((*listed, *documentation(listed), *files.ROUTES))

    async def answer(route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_call(service, route, scope, receive, send)

    return Guard(answer, service.config, table, form_of)
