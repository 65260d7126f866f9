"""Requests of the app to a mlxinfer server: those of the page, under the same key. They block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import InvalidRequestError
from ..http_json import exchange

POLL_S = 5.0  # of silence, for requests that only look
LOAD_S = 1800.0  # a large model from a slow disk
DRAFT = "demo-draft"  # proposes tokens for the demo, and is no partner
MAX_CHATS = 8
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model that the server serves."""

    name: str
    state: str  # unloaded, loading, loaded, unloading
    pinned: bool = False
    weights_bytes: int = 0
    loaded: float = 0.0  # share of it, while it is being loaded
    failure: str = ""  # of the last load


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A download or a conversion of the server.

    Attributes:
        done, total: bytes, or weights of a conversion; total 0: not known yet.
    """

    id: str
    kind: str
    name: str
    state: str  # running, stopping, paused, done, failed, cancelled
    done: int = 0
    total: int = 0
    error: str = ""

    @property
    def open(self) -> bool:
        """Whether it may go on."""
        return self.state in ("running", "stopping", "paused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A stored conversation."""

    id: str
    title: str
    changed_s: float = 0.0  # since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Models and running requests at one moment."""

    models: tuple[ModelStatus, ...] = ()
    running: int = 0  # requests that are being answered
    waiting: int = 0  # that wait for their turn
    # of a prompt that is being read: tokens that are computed, all, and seconds left
    reading: tuple[tuple[int, int, float], ...] = ()
    tokens: int = 0  # of all answers since the server started

    @property
    def busy(self) -> bool:
        """Whether there is a request."""
        return bool(self.running or self.waiting or self.reading)


class ServerClient:
    """One server.

    Args:
        url: "http://host:port".
        key: of the server; empty: it needs none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._key = key or None

    def activity(self) -> Activity:
        """GET /admin/state; raises ServerError, as all methods do."""
        said = self._ask("/admin/state")
        requests = said["requests"]
        unanswered = [item for item in requests if item["waiting"]]
        reading = [
            (item["prompt_read"], item["prompt_tokens"], item["prompt_left_s"] or 0.0)
            for item in unanswered
            if item["prompt_read"]
        ]
        return Activity(
            models=tuple(_model(item["state"]) for item in said["models"]),
            running=len(requests) - len(unanswered),
            waiting=len(unanswered) - len(reading),
            reading=tuple(reading),
            tokens=sum(item["counters"]["generation_tokens"] for item in said["models"]),
        )

    def features(self) -> Mapping[str, Any]:
        """Features of the server: its version, a history, the hub."""
        features: dict[str, Any] = self._ask("/page/features")
        return features

    def transfers(self) -> tuple[Transfer, ...]:
        """Downloads and conversions, the newest first."""
        return tuple(
            Transfer(
                **{name: job[name] for name in ("id", "kind", "name", "state", "done", "total")},
                error=job["error"] or "",
            )
            for job in self._ask("/hub/jobs")["data"]
            if job["state"] != "cancelled"
        )

    def chats(self) -> tuple[Chat, ...]:
        """The newest conversations."""
        listed = self._ask(f"/history/conversations?limit={MAX_CHATS}")["data"]
        conversations = sorted(listed, key=lambda chat: -chat["changed_s"])[:MAX_CHATS]
        return tuple(
            Chat(**{name: stored[name] for name in ("id", "title", "changed_s")})
            for stored in conversations
        )

    def last_answer(self, chat: str) -> str:
        """The last answer of a conversation on the branch that is shown; "": there is none."""
        stored = self._ask(f"/history/conversations/{chat}")
        by_id = {message["id"]: message for message in stored["messages"]}
        message = by_id.get(stored["head"])
        while message is not None and message["role"] != "assistant":
            message = by_id.get(message["parent"])
        return "" if message is None else str(message["content"])

    def models_on_disk(self) -> tuple[str, ...]:
        """Names of complete models that the server does not serve yet, but for the draft."""
        models = self._ask("/hub/models")["data"]
        return tuple(
            model["name"]
            for model in models
            if model["complete"] and not model["served"] and model["name"] != DRAFT
        )

    def has(self, model: str) -> bool:
        """Whether a model is complete on the server's disk."""
        models = self._ask("/hub/models")["data"]
        return any(entry["name"] == model and entry["complete"] for entry in models)

    def suggestions(self) -> tuple[Mapping[str, Any], ...]:
        """Models that fit the server's machine, the best balance first: `Suggestion.as_dict`."""
        return tuple(self._ask("/hub/suggestions")["data"])

    def download(self, model: str) -> None:
        """Begin to download a model of the hub, or go on with it."""
        self._ask("/hub/downloads", {"model": model})

    def load(self, model: str) -> None:
        """Load a model; returns when it is loaded."""
        self._ask("/admin/models/load", {"model": model}, timeout_s=LOAD_S)

    def unload(self, model: str) -> None:
        """Unload a model, after its running requests."""
        self._ask("/admin/models/unload", {"model": model, "drain_s": 30}, timeout_s=60)

    def pin(self, model: str, pinned: bool) -> None:
        """Keep a model in memory, or no longer."""
        self._ask("/admin/models/pin", {"model": model, "pinned": pinned})

    def serve(self, model: str) -> None:
        self._ask("/hub/serve", {"model": model}, timeout_s=60)

    def act(self, transfer: str, action: str) -> None:
        """Pause, resume or cancel a transfer."""
        self._ask(f"/hub/jobs/{transfer}", {"action": action})

    def _ask(self, path: str, body: Any = None, *, timeout_s: float = POLL_S) -> Any:
        return exchange(self.url, path, body, key=self._key, timeout_s=timeout_s)


def _model(said: Mapping[str, Any]) -> ModelStatus:
    progress = said["load_progress"] or {"loaded_bytes": 0, "total_bytes": 0}
    return ModelStatus(
        loaded=progress["loaded_bytes"] / max(progress["total_bytes"], 1),
        **{name: said[name] for name in ("name", "state", "pinned", "weights_bytes")},
        failure=said["failure"] or "",
    )


def checked_url(text: str) -> str:
    """The base address of a server: "localhost:8080/v1/" -> "http://localhost:8080".

    Raises:
        InvalidRequestError: it is none.
    """
    plain = text.strip()
    plain = plain if "://" in plain else f"http://{plain}"
    parts = urlsplit(plain)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port out of range
        usable = False
    bare = not parts.username and parts.path.rstrip("/") in ("", "/v1")
    if not usable or not bare or len(plain.split()) > 1:
        raise InvalidRequestError(
            f"{text.strip()[:80]!r} is no address of a server; one looks like http://127.0.0.1:8080."
        )
    return f"{parts.scheme}://{parts.netloc}"


def is_local(url: str) -> bool:
    """Whether an address is this machine, where the app can start a server."""
    return urlsplit(url).hostname in LOCAL


def port_of(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
