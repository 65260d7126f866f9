"""`bench memory`: KV bytes copied and wasted, ours beside mlx-lm's. Assembles scenes and tables."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..models import load
from ..models.decoder import Model
from .checkpoints import write_checkpoint
from .memory_scenes import PAGE, SMALL, WIDE, Scale, change, decode, waste
from .memory_tables import change_table, decode_table, waste_table
from .our_server import OurServer
from .peer import load_peer_model
from .peer_server import PeerServer
from .report import Report
from .served import Server

CHUNK = 4096  # prompt tokens a step of mlxinfer


def _makers(model: Model, peer_model: object | None, tokens: int) -> list[Callable[[], Server]]:
    """Ours has pages for `tokens` from the start, so that growth does not hide what is measured.

    And it prefills much at a time, as mlx-lm does, so that no stream is far ahead of the others.
    """
    pages = tokens // PAGE + 1
    makers: list[Callable[[], Server]] = [
        lambda: OurServer(model, num_pages=pages, prefill_chunk=CHUNK)
    ]
    if peer_model is not None:
        makers.append(lambda: PeerServer(peer_model, max_batch=64))
    return makers


def run(*, small: bool = False, peer: bool = True) -> Report:
    """All three.

    Args:
        small: seconds instead of a minute.
        peer: also mlx-lm.
    """
    scale = SMALL if small else Scale()
    with TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / "model", WIDE)
        model = load(folder)
        peer_model = load_peer_model(folder) if peer else None
    decodes = {}
    for count, length in scale.streams:
        room = _room(count, length, scale.rounds * scale.steps)
        servers = [make() for make in _makers(model, peer_model, room)]
        decodes[count, length] = decode(servers, count, length, scale.steps, scale.rounds)
    everyone = _room(len(scale.lengths), max(scale.lengths), 0)
    wastes = [waste(make(), scale.lengths) for make in _makers(model, peer_model, everyone)]
    count, length = scale.crowd
    makers = _makers(model, peer_model, _room(count + 1, length, 0))
    changes = [change(make(), count, length) for make in makers]
    names = ("mlxinfer", "mlx-lm")
    data = {
        "decode": [
            {"streams": c, "tokens": n, **_named(names, found)} for (c, n), found in decodes.items()
        ],
        "held": {"lengths": list(scale.lengths), **_named(names, wastes)},
        "join_and_leave": {"streams": count, "tokens": length, **_named(names, changes)},
    }
    tables = [
        decode_table(decodes),
        waste_table(wastes, scale.lengths),
        change_table(changes, count, length),
    ]
    return Report("memory", tables, data)


def _room(count: int, length: int, steps: int) -> int:
    """Tokens that `count` streams have at the end; each answers while the others are prefilled."""
    return count * (length + count * length // (CHUNK // 2) + steps + 8 * PAGE)


def _named(names: Sequence[str], found: Sequence[Any]) -> dict[str, Any]:
    return {name: asdict(each) for name, each in zip(names, found, strict=False)}
