"""Servers with the page: history, models of this disk, and a script in place of the engine."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from live_server import LiveServer, SeveralServer
from scripted import TEMPLATE, Script, ScriptedServer

from mlxinfer import hub
from mlxinfer.cli._inspect import fit_of_repository
from mlxinfer.core import FinishReason, Request, Reuse, ReuseEnd, TokenEvent
from mlxinfer.history import History
from mlxinfer.mcp_tools import McpTools
from mlxinfer.memory import weights_bytes
from mlxinfer.server.app import ROUTES
from mlxinfer.server.page.library import Library
from mlxinfer.server.page.routes import PageRoutes, Setting
from mlxinfer.server.slots import RegistryEntry, ServedModel
from mlxinfer.session.options import EngineOptions
from tests.seeing_folder import seeing_folder
from tests.waiting import LIMIT_S

LIMIT_BYTES = 8_000_000_000
KV_BYTES = 20_000_000
SETTINGS = [
    Setting(name="port", value=8080, origin="default"),
    Setting(name="ttl", value="30m", origin="config file"),
    Setting(name="api-key", value="1 set", origin="environment"),
]


def routes_of(folder: Path, *, history: bool = True, tools: McpTools | None = None) -> PageRoutes:
    """Return the page's routes as `mlxinfer serve` makes them, with all data below `folder`."""

    def entry_of(name: str, source: str) -> RegistryEntry:
        where = hub.resolve(source)

        def load(room_bytes: int) -> ServedModel:
            options = EngineOptions(max_batch=4, max_memory=KV_BYTES, room_bytes=room_bytes)
            return ServedModel.open(name, where, options, created_s=1)

        return RegistryEntry(
            name=name,
            load=load,
            weights_bytes=weights_bytes(where),
            kv_bytes=KV_BYTES,
            source=source,
        )

    library = Library(
        command=(sys.executable, "-m", "mlxinfer.cli"),
        converted=folder / "models",
        added=folder / "served.json",
        entry_of=entry_of,
        limit_bytes=16_000_000_000,
        bandwidth=(150, 200),
        fit_of=lambda name: fit_of_repository(name, LIMIT_BYTES).as_dict(),
    )
    stored = History(folder / "history.db") if history else None
    return PageRoutes(stored, library, SETTINGS, tools)


class PacedScript(Script):
    """Delivers the tokens of an answer in a thread; before `rest` it waits until it may go on.

    Attributes:
        aborted: set when a client has left an answer that was not complete.
        read: tokens of the prompt that were read in so many seconds when the script waits; None:
            it waits before `rest` only.
    """

    def __init__(self, encode: Callable[[str], list[int]], limits: Any) -> None:
        super().__init__(encode, limits)
        self.go_on = threading.Event()
        self.aborted = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Answer `ok`, at once."""
        self.go_on.set()
        self.text, self.rest, self.cached_tokens = "ok", "", 0
        self.pause_s = 0.0
        self.read: tuple[int, float] | None = None
        self.requests.clear()
        self.aborted = threading.Event()
        self.go_on = threading.Event()

    def says(self, text: str, rest: str = "", *, pause_s: float = 0.0) -> None:
        """Set the answer to every request from now on; `pause_s`: between two tokens."""
        self.text, self.rest, self.pause_s = text, rest, pause_s

    def submit(self, request: Request, deliver: Callable[[TokenEvent], None]) -> None:
        self.requests.append(request)
        request.reuse = Reuse(16, ("memory",), 1, ReuseEnd.EVICTED, page_size=16)
        request.arrived_s = time.monotonic()
        work = (request, deliver, self.go_on, self.aborted)
        threading.Thread(target=self._deliver, args=work, daemon=True).start()

    def _deliver(
        self,
        request: Request,
        deliver: Callable[[TokenEvent], None],
        go_on: threading.Event,
        aborted: threading.Event,
    ) -> None:
        first, rest = self._encode(self.text), self._encode(self.rest)
        ids, cached, pause_s = [*first, *rest], self.cached_tokens, self.pause_s
        if self.read is not None:
            computed, seconds = self.read
            now_s = time.monotonic()
            request.started_s = now_s - seconds
            deliver(TokenEvent(request.id, None, prompt_tokens=computed, made_s=now_s))
            go_on.wait(LIMIT_S)
        for number, token in enumerate([*ids, min(request.stop_ids)]):
            if number == len(first) and rest:
                go_on.wait(LIMIT_S)
            if pause_s:
                time.sleep(pause_s)
            if aborted.is_set():
                return
            reason = FinishReason.STOP if number == len(ids) else None
            now_s = time.monotonic()
            event = TokenEvent(request.id, token, reason, cached_tokens=cached, made_s=now_s)
            deliver(event)

    def abort(self, request_id: str) -> None:
        self.aborted.set()

    def aborter(self, request_ids: Sequence[str]) -> Callable[[], None]:
        return self.aborted.set

    def stats(self) -> dict[str, Any]:
        return {
            **{"running": 1, "waiting": 0, "steps": 10, "tokens_computed": 30, "preemptions": 0},
            **{"kv_bytes_held": 300_000, "kv_bytes_cached": 500_000, "kv_bytes_allocated": 900_000},
            **{"active_memory_bytes": 3_000_000, "peak_memory_bytes": 4_000_000},
            **{"step_failures": 0, "prompt_tokens_computed": 7, "bytes_copied": 0},
            "groups": [{"pages": 1000, "page_bytes": 1000, "pages_held": 0}],
            "disk": {"num_bytes": 12_000_000},
            "speculation": {
                **{"drafts": 3, "drafted": 9, "accepted": 5, "switched_off": 2, "accepted_at": []},
                "sources": {"draft": {"switched_off": 2, "last_error": "ValueError: odd"}},
            },
        }


class LivePageServer(LiveServer):
    """The demo model itself with the page: history, models, and all other data below `folder`.

    A server with other models has this class before its own, which takes the further arguments.
    """

    def __init__(
        self,
        folder: Path,
        *given: Any,
        history: bool = True,
        tools: McpTools | None = None,
        **config: Any,
    ) -> None:
        self.folder = folder
        self.routes = routes_of(folder, history=history, tools=tools)
        self.routes_served = (*ROUTES, *self.routes.routes())
        super().__init__(*given, **config)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.routes.close()


class PageServer(LivePageServer, ScriptedServer):
    """A server of `demo` with answers by a script, with history and models."""

    script: PacedScript

    def __init__(self, folder: Path, template: str = TEMPLATE, **config: Any) -> None:
        super().__init__(folder, template, **config)
        self.service.models.limit_bytes = LIMIT_BYTES  # room for models that are added
        tokenizer = self.model.tokenizer
        script = PacedScript(
            lambda text: tokenizer.encode(text, parse_special=True), self.model.session.limits
        )
        self.script = script
        self.model.session.engine = script  # type: ignore[assignment]  # as far as it is used

    def __exit__(self, *error: object) -> None:
        self.script.go_on.set()
        super().__exit__(*error)


class SeeingPageServer(LivePageServer, SeveralServer):
    """A server of `tiny-see`, which sees, and of the demo, which does not; with history."""

    def __init__(self, folder: Path, **config: Any) -> None:
        folders = {
            "tiny-see": seeing_folder(folder / "tiny-see"),
            "demo": hub.resolve("demo-draft"),
        }
        super().__init__(folder, folders, {name: {"max_batch": 2} for name in folders}, **config)
