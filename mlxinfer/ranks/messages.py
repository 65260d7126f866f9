"""The messages between rank 0 and the others, apart from steps (wire.py)."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec

from ..cache.kv import KVCache
from ..errors import RanksFailedError
from ..models.weights.files import read_headers
from .wire import StepMessage, WorkMessage


class Order(msgspec.Struct, array_like=True, tag="order"):
    """An order of rank 0: the others call the method of this name, see `Orders`."""

    name: str
    arguments: list[Any]


class Orders:
    """The methods that rank 0 may call on the others, by name.

    Arguments are checked against the types that the methods declare, so that nothing else than
    numbers, bytes and text arrives.

    Args:
        methods: by the name that rank 0 uses.
    """

    def __init__(self, **methods: Callable[..., None]) -> None:
        self._methods = methods
        self._types: dict[str, Any] = {}
        for name, method in methods.items():
            hints = get_type_hints(method)
            hints.pop("return", None)
            self._types[name] = GenericAlias(tuple, tuple(hints.values()))

    def obey(self, order: Order) -> None:
        """Call a method; msgspec.ValidationError where the arguments are not of its types."""
        arguments = msgspec.convert(order.arguments, self._types[order.name])
        self._methods[order.name](*arguments)


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The model is there, or why not."""

    rank: int
    load: int  # number of the order
    problem: str | None
    weights_bytes: int
    bytes_read: int  # from files
    memory_bytes: int  # of the machine


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The cache is there."""

    max_batch: int
    num_pages: list[int]  # of each layer group
    page_bytes: list[int]  # of each layer group; 0: this rank has none of its layers
    max_snapshots: int  # of states


class AdapterDone(msgspec.Struct, array_like=True, tag="adapted"):
    """An adapter was read, or a piece of it loaded, or why not."""

    rank: int
    load: int  # number of the order that loaded the model
    number: int
    problem: str | None
    num_bytes: int  # that it will take here; of pieces 0
    ended: bool  # there is no further piece


class DiskDone(msgspec.Struct, array_like=True, tag="done"):
    """Pages were read, or written."""

    number: int  # of the order
    missing: list[int]  # places among those of the order that were not read, or written in time


class Checked(msgspec.Struct, array_like=True, tag="checked"):
    """The checksum of a step."""

    number: int
    value: int


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """It cannot go on, and ends."""

    reason: str


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    """It lives."""


@dataclass(frozen=True, slots=True)
class Others:
    """The way of rank 0 to the other ranks."""

    count: int  # how many there are
    tell: Callable[..., None]  # sends an order to all of them: its name and arguments
    # takes the next answer of a kind; None: none came within the seconds that are given
    hear: Callable[[type, float], Any]
    # ends the group, and returns the error to raise
    fail: Callable[[BaseException], RanksFailedError]
    step_s: float  # seconds that a step may take


ORDERS = msgspec.msgpack.Decoder(Order | StepMessage | WorkMessage)  # of rank 0
REPLIES = msgspec.msgpack.Decoder(Loaded | Ready | AdapterDone | DiskDone | Checked | Failed | Pong)
encode = msgspec.msgpack.Encoder().encode


def ready(cache: KVCache) -> Ready:
    """The room in a cache, for rank 0."""
    states = cache.state_group
    pages = [group.allocator.num_pages for group in cache.groups]
    costs = [group.page_bytes for group in cache.groups]
    return Ready(cache.max_batch, pages, costs, 0 if states is None else states.max_snapshots)


def digest_of(folder: Path) -> int:
    """The digest of config.json and of all headers, to compare the checkpoints of two machines.

    Raises what `read_headers` raises.
    """
    total = zlib.crc32((folder / "config.json").read_bytes())
    for path, header in sorted(read_headers(folder).items()):
        total = zlib.crc32(f"{path.name} {sorted(header.items())}".encode(), total)
    return total
