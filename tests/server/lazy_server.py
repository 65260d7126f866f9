"""A live server of the two bundled models, which are loaded when a request names them."""

import threading
from typing import Any

from live_server import LiveServer, in_no_hurry

from mlxinfer import hub
from mlxinfer.memory import weights_bytes
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.slots import RegistryEntry, ServedModel
from mlxinfer.session.options import EngineOptions

MB = 10**6


class LazyServer(LiveServer):
    """`big` is the demo model and comes first, `small` its draft.

    Args:
        limit_bytes: of both together.
        fields: of the entries, by name.
        config: of ServerConfig.

    Attributes:
        clock_s: the time by which models are idle; it stands unless a test moves it.
        go_on: cleared, it holds up loads.
    """

    def __init__(
        self,
        limit_bytes: int = 100 * MB,
        fields: dict[str, dict[str, Any]] | None = None,
        **config: Any,
    ) -> None:
        self.loads: list[str] = []
        self.clock_s = 0.0
        self.go_on = threading.Event()
        self.go_on.set()
        given = fields or {}
        entries = [
            self.entry("big", "demo", given.get("big", {})),
            self.entry("small", "demo-draft", given.get("small", {})),
        ]
        models = ModelRegistry(entries, limit_bytes=limit_bytes, clock=lambda: self.clock_s)
        self.listen(models, **config)

    def entry(self, name: str, source: str, fields: dict[str, Any]) -> RegistryEntry:
        folder = hub.resolve(source)

        def load(room_bytes: int) -> ServedModel:
            self.loads.append(name)
            assert self.go_on.wait(60)
            options = EngineOptions(
                max_batch=4, max_memory=fields.get("kv_bytes"), room_bytes=room_bytes
            )
            return in_no_hurry(ServedModel.open(name, folder, options, created_s=1))

        return RegistryEntry(
            **{"name": name, "load": load, "weights_bytes": weights_bytes(folder), **fields}
        )

    def states(self) -> dict[str, str]:
        models = self.get("/admin/models").json()["models"]
        return {model["name"]: model["state"] for model in models}
