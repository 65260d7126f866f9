"""The models that a server knows of, loaded or not: what was said of each. Loads nothing itself."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .served import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model.

    Attributes:
        name: that requests and answers use.
        load: makes it run within so many bytes, weights and KV cache together (the cache alone
            has `kv_bytes`, where that is given); called off the event loop.
        weights_bytes: as its files say; what it takes is known once it was loaded.
        aliases: further names that requests may use.
        kv_bytes: a KV budget of its own; None: a share of the server's.
        pinned: loaded at the start, and never unloaded.
        preload: loaded at the start, as far as there is room.
        ttl_s: seconds without a request after which it is unloaded; None: never.
        created_s: seconds since 1970.
    """

    name: str
    load: Callable[[int], ServedModel]
    weights_bytes: int = 0
    aliases: tuple[str, ...] = ()
    kv_bytes: int | None = None
    pinned: bool = False
    preload: bool = False
    ttl_s: float | None = None
    created_s: int = 0


def weights_bytes(folder: Path) -> int:
    """Bytes of the weight files in a checkpoint's folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
