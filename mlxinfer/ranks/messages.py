"""What rank 0 and the others say to each other, apart from steps (wire.py)."""

import zlib
from pathlib import Path

import msgspec

from ..cache.kv import KVCache
from ..models.weights.files import read_headers
from .control import Messages
from .wire import SpillPart, StepMessage, WorkMessage


class Load(msgspec.Struct, array_like=True, tag="load"):
    """Load your part of a model. To be answered by `Loaded`."""

    number: int  # of such orders so far
    name: str
    folder: str
    dtype: str
    pipeline: bool
    digest: int  # of the checkpoint's files, see `digest_of`


class Assemble(msgspec.Struct, array_like=True, tag="assemble"):
    """Make the KV cache: fields of EngineConfig and KVOptions. To be answered by `Ready`."""

    page_size: int
    max_batch: int
    prefill_chunk: int
    kv_budget_bytes: int
    num_pages: int | None
    kv_bits: tuple[int | None, int | None]
    kv_window: int | None
    kv_sinks: int
    kv_plain_ends: bool
    kv_plain_windows: bool
    taps: list[int]  # layers of which rank 0 wants the outputs


class Commit(msgspec.Struct, array_like=True, tag="commit"):
    """Tokens of a step with proposals that stay, see `KVCache.commit`."""

    num_kept: dict[int, int]


class Reset(msgspec.Struct, array_like=True, tag="reset"):
    """Forget what is in the cache."""


class Resize(msgspec.Struct, array_like=True, tag="resize"):
    """Pages that each layer group may have from now on: adapters take memory, or give it back."""

    num_pages: list[int]


class AdapterCheck(msgspec.Struct, array_like=True, tag="adapter"):
    """Read an adapter's files, which must be these. To be answered by `AdapterDone`."""

    number: int  # of its rows in steps
    folder: str
    identity: str


class AdapterPiece(msgspec.Struct, array_like=True, tag="piece"):
    """Load the next piece of it. To be answered by `AdapterDone`."""

    number: int


class AdapterRemove(msgspec.Struct, array_like=True, tag="remove"):
    """Take an adapter off the model, whatever of it is there."""

    number: int


class DiskOpen(msgspec.Struct, array_like=True, tag="disk"):
    """Keep pages in a folder of this path, under this namespace and the rank's number."""

    folder: str
    namespace: bytes
    max_bytes: int


class DiskFetch(msgspec.Struct, array_like=True, tag="fetch"):
    """Read pages for the next step. To be answered by `DiskDone`."""

    number: int  # of such orders so far
    places: list[tuple[int, bytes]]  # layer group, key


class DiskSave(msgspec.Struct, array_like=True, tag="save"):
    """Store pages, and wait for the writes. To be answered by `DiskDone`."""

    number: int  # of such orders so far
    spills: list[SpillPart]
    timeout_s: float


class Release(msgspec.Struct, array_like=True, tag="release"):
    """Forget the model and its cache; another may follow."""


class Form(msgspec.Struct, array_like=True, tag="form"):
    """All ranks are there: form the group of MLX."""


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Say that you live. To be answered by `Pong`, whatever else is being done."""


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


ORDERS = (
    *(Load, Assemble, StepMessage, Commit, Reset, Release, Form, Ping),
    *(Resize, AdapterCheck, AdapterPiece, AdapterRemove),
    *(DiskOpen, DiskFetch, DiskSave, WorkMessage),
)
REPLIES = (Loaded, Ready, Checked, Failed, Pong, AdapterDone, DiskDone)


def ready(cache: KVCache) -> Ready:
    """What there is room for in a cache."""
    states = cache.state_group
    pages = [group.allocator.num_pages for group in cache.groups]
    costs = [group.page_bytes for group in cache.groups]
    return Ready(cache.max_batch, pages, costs, 0 if states is None else states.max_snapshots)


def orders() -> Messages:
    """What rank 0 says."""
    return Messages(ORDERS)


def replies() -> Messages:
    """What the others say."""
    return Messages(REPLIES)


def digest_of(folder: Path) -> int:
    """Of config.json and of all headers: that ranks on two machines have the same checkpoint.

    Errors as of `read_headers`.
    """
    total = zlib.crc32((folder / "config.json").read_bytes())
    for path, header in sorted(read_headers(folder).items()):
        total = zlib.crc32(f"{path.name} {sorted(header.items())}".encode(), total)
    return total
