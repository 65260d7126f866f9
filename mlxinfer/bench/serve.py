"""`bench serve`: two servers, one model, the same clients. Assembles scenes and tables."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import hub
from .checkpoints import LAPTOP, SMALL, Dense, write_checkpoint
from .peer_version import require_peer
from .report import Report, Table, ratio
from .serve_processes import Side, serving
from .serve_scenes import (
    ROUNDS,
    Found,
    Scene,
    behind_a_prefill,
    beside_a_stream,
    conversations,
    shared_prefix,
    together,
)

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
NAMES = ("mlxinfer", "mlx-lm")


def run(*, small: bool = False, peer: bool = True) -> Report:
    """Every scene on both servers, one after the other."""
    if peer:
        require_peer()
    with TemporaryDirectory() as scratch:
        folder = write_served(Path(scratch) / "model", SMALL if small else LAPTOP)
        with ExitStack() as stack:
            names = NAMES if peer else NAMES[:1]
            sides = [stack.enter_context(serving(name, folder)) for name in names]
            found = [asyncio.run(_measured(scene, sides)) for scene in scenes(small)]
            costs = [asyncio.run(_cpu_per_token(side, 32 if small else 64)) for side in sides]
    rows = [[list(figures) for figures in zip(*scene, strict=True)] for scene in found]
    figures = [row for scene in rows for row in scene] + [costs]
    data = {"figures": [[asdict(side) for side in row] for row in figures]}
    return Report("serve", [_table(figures, small)], data)


def write_served(folder: Path, dense: Dense) -> Path:
    """A random checkpoint that speaks the demo model's tokens."""
    demo = hub.resolve("demo")
    config = json.loads((demo / "config.json").read_text())
    write_checkpoint(folder, replace(dense, vocab=config["vocab_size"]))
    for name in TOKENIZER:
        shutil.copyfile(demo / name, folder / name)
    return folder


def scenes(small: bool) -> list[Scene]:
    """What is measured, in order."""
    tokens, long, counts = (8, 60, (1, 4)) if small else (32, 1500, (1, 8, 32))
    greedy: list[Scene] = [
        partial(together, count=n, tokens=tokens, label="greedy", settings=_greedy) for n in counts
    ]
    mixed: list[Scene] = [
        partial(together, count=n, tokens=tokens, label="each its own top-p", settings=_top_p)
        for n in counts[1:]
    ]
    return [
        partial(beside_a_stream, stream=24 if small else 400, shorts=3 if small else 16),
        partial(behind_a_prefill, long=long, stream=24 if small else 400),
        *greedy,
        *mixed,
        partial(together, count=4, tokens=tokens, label="seeded", settings=_seeded),
        partial(shared_prefix, count=6, prefix=40 if small else 800),
        partial(conversations, count=4 if small else 16, turns=2 if small else 3),
    ]


def _greedy(index: int) -> dict[str, Any]:
    return {}


def _top_p(index: int) -> dict[str, Any]:
    return {"temperature": 0.8, "top_p": 0.7 + 0.005 * index}


def _seeded(index: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": index}


async def _measured(scene: Scene, sides: Sequence[Side]) -> list[list[Found]]:
    return [await scene(side.port) for side in sides]


async def _cpu_per_token(side: Side, tokens: int) -> Found:
    """Processor time of the whole process for one streamed token, 8 streams at once."""
    before = side.cpu_s()
    await together(side.port, count=8, tokens=tokens, label="streams", settings=_greedy)
    spent = side.cpu_s() - before
    return Found(
        "8 streams: processor time a token, model included",
        spent / (8 * tokens * (ROUNDS + 1)) * 1e3,
        unit="ms",
    )


def _table(figures: Sequence[Sequence[Found]], small: bool) -> Table:
    rows = []
    for row in figures:
        ours, *theirs = row
        values = [
            f"{side.value:,.3f}" if side.unit == "s" else f"{side.value:,.1f}" for side in row
        ]
        pair = (ours.value, theirs[0].value) if theirs and ours.higher else ()
        better = ratio(*pair) if pair else ratio(theirs[0].value, ours.value) if theirs else "-"
        rows.append([f"{ours.label} ({ours.unit})", *values, *["-"] * (2 - len(values)), better])
    return Table(
        "Two servers, one model" + (", small" if small else ""),
        ["", *NAMES, "ratio"],
        rows,
        "A random float32 model with the demo's tokens (55M weights), both servers with their "
        "defaults, OpenBLAS under both; one after the other over loopback, streamed.",
    )
