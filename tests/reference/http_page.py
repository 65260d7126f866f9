"""docs/http.md: a request and a reply for each path, as a server of the demo gives them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.drawn import dense_tensors, draw, write_peft
from live_server import LiveServer, in_no_hurry, models_of

from mlxinfer import hub
from mlxinfer.server import openapi
from mlxinfer.server.app import ROUTES
from mlxinfer.server.http import Route
from mlxinfer.server.slots import ServedModel
from mlxinfer.server.store import ResponseStore
from mlxinfer.session.options import EngineOptions
from mlxinfer.session.saved import NamedSessions
from tests.waiting import wait_until

ALL = (*ROUTES, openapi.route_of(ROUTES))
GROUPS = {  # module of the handlers -> heading
    "chat": "Chat, of OpenAI",
    "completions": "Completions, of OpenAI",
    "responses": "Responses, of OpenAI",
    "anthropic": "Messages, of Anthropic",
    "ollama": "Ollama",
    "llama_cpp": "llama.cpp",
    "embeddings": "Embeddings, reranking, scores",
    "tokens": "Tokens",
    "models": "Models",
    "sessions": "Named sessions",
    "ops": "For operators",
    "kv": "Between servers",
    "openapi": "This list",
}


@dataclass(frozen=True)
class Example:
    """A request of the page; `{id}` in its path is the id of the reply before."""

    body: Any = None
    path: str = ""  # with a query or an id; "": that of the route
    streams: bool = False
    note: str = ""  # behind the title, where a path has several
    binary: str = ""  # what body and reply are, where they are no JSON


MAX_KEYS, MAX_ITEMS, MAX_CHARS, WIDTH = 30, 2, 80, 110  # of a value that the page shows
ID = re.compile("[0-9a-f]{24,}")
EARLIEST_S = 1_750_000_000  # any larger number is a time, in seconds since 1970
HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 16, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "A page", "temperature": 0}
KEYS = "0" * 40
BY_PEERS = "bytes, which [servers that share prompts](peers.md) send each other"
FILE = "the bytes of the session's file"
EXAMPLES: dict[tuple[str, str], tuple[Example, ...]] = {
    ("POST", "/v1/chat/completions"): (
        Example(ASK),
        Example({**ASK, "max_tokens": 3}, streams=True),
    ),
    ("POST", "/v1/completions"): (Example({**TEXT, "max_tokens": 8}),),
    ("POST", "/completion"): (Example({**TEXT, "n_predict": 8}),),
    ("POST", "/infill"): (Example({"input_prefix": "def f():\n", "input_suffix": "\nf()"}),),
    ("GET", "/props"): (Example(),),
    ("POST", "/v1/responses"): (
        Example(
            {"input": "Count", "background": True, "max_output_tokens": 16},
            note=", in the background",
        ),
        Example({"input": "Hello", "max_output_tokens": 16, "temperature": 0}),
    ),
    ("GET", "/v1/responses/{id}"): (Example(path="/v1/responses/{id}"),),
    ("GET", "/v1/responses/{id}/input_items"): (Example(path="/v1/responses/{id}/input_items"),),
    ("DELETE", "/v1/responses/{id}"): (Example(path="/v1/responses/{id}"),),
    ("POST", "/v1/responses/{id}/cancel"): (Example(path="/v1/responses/{background}/cancel"),),
    ("POST", "/v1/responses/input_tokens"): (Example({"input": "Hello"}),),
    ("POST", "/v1/messages"): (Example(ASK),),
    ("POST", "/v1/messages/count_tokens"): (Example({"model": "demo", "messages": HELLO}),),
    ("GET", "/v1/models"): (Example(),),
    ("GET", "/v1/models/{name:path}"): (Example(path="/v1/models/demo"),),
    ("POST", "/v1/sessions"): (Example({"name": "notes"}),),
    ("GET", "/v1/sessions"): (Example(),),
    ("POST", "/v1/sessions/{id}/load"): (Example({"id_slot": 3}, "/v1/sessions/notes/load"),),
    ("GET", "/v1/sessions/{id}/file"): (Example(path="/v1/sessions/notes/file", binary=FILE),),
    ("PUT", "/v1/sessions"): (Example(path="/v1/sessions?name=copy", binary=FILE),),
    ("DELETE", "/v1/sessions/{id}"): (Example(path="/v1/sessions/copy"),),
    ("POST", "/tokenize"): (Example({"prompt": "A page"}),),
    ("POST", "/detokenize"): (Example({"tokens": [36, 220, 100]}),),
    ("GET", "/tokenizer_info"): (Example(),),
    ("POST", "/v1/embeddings"): (Example({"model": "vectors", "input": ["A page"]}),),
    ("POST", "/v1/rerank"): (
        Example({"model": "vectors", "query": "page", "documents": ["A page", "A seed"]}),
    ),
    ("POST", "/v1/score"): (
        Example({"model": "vectors", "text_1": "page", "text_2": ["A page", "A seed"]}),
    ),
    ("POST", "/api/chat"): (Example({**ASK, "stream": False}),),
    ("POST", "/api/generate"): (
        Example({"model": "demo", "prompt": "Hello", "stream": False, "options": {"seed": 1}}),
    ),
    ("POST", "/api/embed"): (Example({"model": "vectors", "input": ["A page"]}),),
    ("POST", "/api/embeddings"): (Example({"model": "vectors", "prompt": "A page"}),),
    ("GET", "/api/tags"): (Example(),),
    ("GET", "/api/ps"): (Example(),),
    ("GET", "/api/version"): (Example(),),
    ("POST", "/api/show"): (Example({"model": "demo"}),),
    ("POST", "/api/pull"): (Example({"model": "org/name"}),),
    ("GET", "/health"): (Example(),),
    ("GET", "/version"): (Example(),),
    ("GET", "/ready"): (Example(),),
    ("GET", "/server_info"): (Example(),),
    ("GET", "/v1/reuse"): (Example(),),
    ("GET", "/v1/reuse/{id}"): (Example(path="/v1/reuse/{request}"),),
    ("GET", "/metrics"): (Example(binary="text of Prometheus, see [metrics](metrics.md)"),),
    ("GET", "/v1/loads"): (Example(),),
    ("GET", "/admin/models"): (Example(),),
    ("POST", "/admin/models/load"): (Example({"model": "demo"}),),
    ("GET", "/admin/state"): (Example(),),
    ("POST", "/v1/load_lora_adapter"): (Example({"lora_name": "poet", "lora_path": "poet"}),),
    ("POST", "/v1/unload_lora_adapter"): (Example({"lora_name": "poet"}),),
    ("POST", "/v1/kv/held"): (Example({"namespace": "{space}", "keys": KEYS}, binary=BY_PEERS),),
    ("POST", "/v1/kv/entries"): (Example({"namespace": "{space}", "keys": KEYS}, binary=BY_PEERS),),
    ("POST", "/v1/kv/compute"): (Example({"namespace": "{space}", "token_ids": [36, 220]}),),
    ("POST", "/admin/models/pin"): (Example({"model": "vectors", "pinned": False}),),
    ("POST", "/admin/models/unload"): (Example({"model": "vectors"}),),
    ("GET", "/openapi.json"): (Example(binary="a document of OpenAPI 3.1"),),
}
OTHER_NAMES = {  # paths that answer as another does
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/score": "/v1/score",
    "/v1/health": "/health",
    "/ping": "/health",
}


class ReferenceServer(LiveServer):
    """The demo, with a disk cache, and its draft as a model of vectors."""

    def __init__(self, folder: Path) -> None:
        engine = {"disk_cache": "50MB", "disk_cache_dir": folder / "kv", "gives_pages": True}
        options = EngineOptions(max_batch=4, **engine)  # type: ignore[arg-type]
        self.model = in_no_hurry(
            ServedModel.open("demo", hub.resolve("demo"), options, created_s=1_700_000_000)
        )
        vectors = ServedModel.open(
            "vectors", hub.resolve("demo-draft"), EngineOptions(task="embed"), created_s=1
        )
        write_peft(folder / "poet", draw(dense_tensors(hub.resolve("demo")), 0))
        store = ResponseStore(folder / "responses.db", max_bytes=1 << 24, max_age_s=3600.0)
        models = models_of([self.model, vectors])
        self.listen(models, None, store, adapter_folders=(str(folder),), allow_peers=True)
        self.service.sessions = NamedSessions(folder / "kv", 1 << 30)

    def namespace(self) -> str:
        """The name of the demo's pages, once its weights are identified."""
        pages = self.model.session.pages
        wait_until(lambda: pages.namespace() is not None)
        return (pages.namespace() or b"").hex()


@dataclass
class Exchange:
    """An example, and what a server replied to it."""

    route: Route
    example: Example
    sent: str  # the path
    body: Any
    status: int
    reply: Any  # plain data, or text of events


def exchanges(folder: Path) -> Iterator[Exchange]:
    """Send every example, in order, to a new server."""
    routes = {(route.method, route.path): route for route in ALL}
    kept: dict[str, str] = {}  # placeholders of paths and bodies
    file = b""
    with ReferenceServer(folder) as server:
        kept["space"] = server.namespace()
        for key, examples in EXAMPLES.items():
            for example in examples:
                sent = filled(example.path or key[1], kept)
                body = json.loads(filled(json.dumps(example.body), kept))
                given: dict[str, Any] = {} if body is None else {"json": body}
                if example.streams:
                    given = {"json": {**body, "stream": True}}
                if key[0] == "PUT":
                    given = {"content": file}
                elif key[0] == "POST" and not given:
                    given = {"headers": {"content-type": "application/json"}}
                response = server.client.request(key[0], sent, **given)
                if key == ("GET", "/v1/sessions/{id}/file"):
                    file = response.content
                plain = response.headers["content-type"].startswith("application/json")
                reply = response.json() if plain else response.text if example.streams else None
                if plain and "id" in reply:
                    kept["id"] = reply["id"]
                    kept.setdefault("request", reply["id"])
                    if isinstance(body, dict) and body.get("background"):
                        kept["background"] = reply["id"]
                sent_body = given.get("json") if body is not None else None
                yield Exchange(routes[key], example, sent, sent_body, response.status_code, reply)


def filled(text: str, kept: Mapping[str, str]) -> str:
    """The text with the values of its placeholders."""
    return re.sub(
        r"\{(id|request|space|background)\}", lambda match: kept.get(match[1], match[0]), text
    )


def cut(value: Any) -> Any:
    """Plain data with short texts and lists and without ids, so that a page can show it."""
    if isinstance(value, dict):
        items = list(value.items())
        shown = {key: cut(item) for key, item in items[:MAX_KEYS]}
        return shown if len(items) <= MAX_KEYS else {**shown, "…": "…"}
    if isinstance(value, list):
        shown_items = [cut(item) for item in value[:MAX_ITEMS]]
        return shown_items if len(value) <= MAX_ITEMS else [*shown_items, "…"]
    if isinstance(value, str):
        text = ID.sub("1a2b3c", value)
        return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "…"
    if isinstance(value, int) and value > EARLIEST_S:
        return EARLIEST_S
    if isinstance(value, float):
        return float(f"{value:.3g}")
    return value


def alike(said: Any, reply: Any) -> bool:
    """Whether a reply has the form of the one that the page shows: its keys, and their types."""
    if said is None or reply is None or said == "…":
        return True
    if isinstance(said, dict) and isinstance(reply, dict):
        keys = said.keys() - {"…"}
        whole = keys == reply.keys() or ("…" in said and keys <= reply.keys())
        return whole and all(alike(said[key], reply[key]) for key in keys)
    if isinstance(said, list) and isinstance(reply, list):
        return all(alike(a, b) for a, b in zip(said, reply, strict=False))
    numbers = int | float
    return isinstance(said, numbers) == isinstance(reply, numbers) and isinstance(
        said, type(reply) if not isinstance(reply, numbers) else numbers
    )


def page(exchanges: list[Exchange]) -> str:
    """docs/http.md."""
    parts, heading = list[str](), ""
    for name, title in GROUPS.items():
        for exchange in exchanges:
            if exchange.route.handler.__module__.rpartition(".")[2] != name:
                continue
            parts += [f"## {title}\n"] if title != heading else []
            heading = title
            parts.append(section(exchange))
    same = "\n".join(f"| `{path}` | `{other}` |" for path, other in OTHER_NAMES.items())
    parts.append(f"## Other names\n\n| path | answers as |\n|---|---|\n{same}\n")
    return "\n".join(parts)


def title_of(exchange: Exchange) -> str:
    """The heading of an exchange."""
    more = ", streamed" if exchange.example.streams else exchange.example.note
    return f"### `{exchange.route.method} {openapi.plain_path(exchange.route)}`{more}"


def section(exchange: Exchange) -> str:
    """The part of an exchange."""
    route, example = exchange.route, exchange.example
    access = {"admin": " For an administrator.", "anyone": " Needs no key."}.get(route.access, "")
    lines = [title_of(exchange), ""]
    lines += [openapi.summary_of(route) + access, ""]
    query = f" `{route.method} {ID.sub('1a2b3c', exchange.sent)}`" if example.path else ""
    if exchange.body is not None:
        shown = json.dumps(cut(exchange.body), ensure_ascii=False)
        lines += [f"Request:{query}\n\n```json\n{shown}\n```\n"]
    elif example.path:
        lines += [f"Request:{query}\n"]
    if example.binary:
        lines += [f"The reply (or, of a PUT, the body) is {example.binary}.\n"]
    if example.streams:
        lines += [f"```text\n{ID.sub('1a2b3c', exchange.reply.strip())}\n```\n"]
    elif exchange.reply is not None and not example.binary:
        status = "" if exchange.status == 200 else f" ({exchange.status})"
        lines += [f"Reply{status}:\n\n```json\n{pretty(cut(exchange.reply))}\n```\n"]
    return "\n".join(lines)


def pretty(value: Any, indent: int = 0) -> str:
    """JSON in which a list or an object stands on one line where that is short enough."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    space = " " * (indent + 1)
    if isinstance(value, dict):
        items = [
            f"{json.dumps(k, ensure_ascii=False)}: {pretty(v, indent + 1)}"
            for k, v in value.items()
        ]
        return "{\n" + ",\n".join(f"{space}{item}" for item in items) + f"\n{' ' * indent}}}"
    items = [pretty(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(f"{space}{item}" for item in items) + f"\n{' ' * indent}]"
