"""`bench memory`: KV bytes copied and wasted, ours beside mlx-lm's.

MLX updates an array in place only where nothing else holds it, and operations in flight do. MLX
limits how many those are, so an engine that launches ahead copies its KV cache only where a whole
step has few; such copies show as memory above what is held between steps. Padding shows as bytes
held for a live token, and moving whole caches as memory while a request joins or leaves.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.bench.report import Report, Table
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.bench.checkpoints import Dense, random_prompt, write_checkpoint
from tests.bench.engines import ENDLESS, Ask, Engine, OurEngine, greedy, until_decoding
from tests.bench.kv import peak_bytes
from tests.bench.peer import PeerEngine
from tests.bench.tables import SIDES, named, sides

WIDE = Dense(hidden=64, inner=128, layers=2, heads=4, kv_heads=4, head_dim=64, vocab=256)
TOKEN_BYTES = WIDE.layers * 2 * WIDE.kv_heads * WIDE.head_dim * 4  # float32
PAGE = 16


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode steps of streams that hold much KV."""

    held_bytes: int  # of KV cache
    extra_bytes: int  # peak memory of the steps, above what was held before them
    tokens_per_s: float

    @property
    def extra_share(self) -> float:
        """Of the KV cache: 1.0 is a second copy of all of it."""
        return self.extra_bytes / self.held_bytes


@dataclass(frozen=True, slots=True)
class Waste:
    """KV held for live tokens of different lengths."""

    live_bytes: int  # what the tokens themselves take
    rounded_bytes: int  # the same in whole pages
    held_bytes: int
    tail_bytes: int  # of which tails


@dataclass(frozen=True, slots=True)
class Change:
    """Peak memory of steps, above what was held before them."""

    steady_bytes: int  # no request joins or leaves
    join_bytes: int  # in the steps until a short prompt has its first token
    leave_bytes: int  # in the steps until one has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many streams of how many tokens."""

    streams: tuple[tuple[int, int], ...] = ((1, 8192), (64, 1024))
    steps: int = 32
    rounds: int = 3
    lengths: tuple[int, ...] = (3000, 500, 10)
    crowd: tuple[int, int] = (15, 1024)  # requests that another joins


SMALL = Scale(streams=((2, 200),), steps=20, lengths=(120, 50, 10), crowd=(3, 100))


def fill(engine: Engine, lengths: Sequence[int], limits: Sequence[int] | None = None) -> None:
    """Start a stream for each length and step until every one decodes."""
    until_decoding(
        engine,
        [
            Ask(
                str(index),
                [("user", random_prompt(length, WIDE.vocab, index))],
                greedy(limits[index]) if limits else ENDLESS,
            )
            for index, length in enumerate(lengths)
        ],
    )


def settle(engine: Engine, steps: int = 2 * PAGE + 2) -> None:
    """Decode steps; after so many, rings are full and every kind of step was seen."""
    for _ in range(steps):
        engine.step()


def decode(
    engines: Sequence[Engine], count: int, length: int, steps: int, rounds: int
) -> list[Decode]:
    """Peak and speed of `steps` decode steps; the sides alternate, and speed is the median."""
    for engine in engines:
        fill(engine, [length] * count)
        settle(engine)
    held = [engine.running_bytes for engine in engines]
    extra = [0] * len(engines)
    speeds: list[list[float]] = [[] for _ in engines]
    for _ in range(rounds):
        for index, engine in enumerate(engines):
            started = time.perf_counter()
            extra[index] = max(extra[index], peak_bytes(partial(settle, engine, steps)))
            speeds[index].append(count * steps / (time.perf_counter() - started))
    return [Decode(*each) for each in zip(held, extra, map(statistics.median, speeds), strict=True)]


def waste(engine: Engine, lengths: Sequence[int]) -> Waste:
    """Return the bytes that are held for `lengths` just after their first tokens."""
    fill(engine, lengths)
    live = sum(lengths)
    rounded = sum(-(-length // PAGE) * PAGE for length in lengths)
    held = engine.running_bytes
    return Waste(live * TOKEN_BYTES, rounded * TOKEN_BYTES, held, engine.tail_bytes)


def change(engine: Engine, count: int, length: int) -> Change:
    """A crowd decodes; one joins with a short prompt, and one leaves."""
    fill(engine, [length] * count)
    settle(engine)
    steady = peak_bytes(partial(settle, engine, 4))

    def join() -> None:
        ask = Ask.of("new", random_prompt(PAGE, WIDE.vocab, 77), 4)
        engine.submit(ask)
        until(engine, lambda names: "new" in names)

    def leave() -> None:
        until(engine, lambda names: "new" not in names)

    joined = peak_bytes(join)
    return Change(steady, joined, peak_bytes(leave))


def until(engine: Engine, done: Callable[[set[str]], bool]) -> None:
    """Step until the names that got a token are as `done` wants them."""
    while not done({token.name for token in engine.step()}):
        pass


COLUMNS = ["", *SIDES]


def decode_table(found: Mapping[tuple[int, int], Sequence[Decode]]) -> Table:
    """Bytes and speed of decode steps, for each number of streams."""
    rows = []
    for (count, length), each in found.items():
        label = f"{count} x {length:,}"
        rows += [
            [f"{label}: KV held (MB)", *megabytes([one.held_bytes for one in each])],
            [f"{label}: peak above it (MB)", *megabytes([one.extra_bytes for one in each])],
            [f"{label}: peak / KV held", *sides([one.extra_share for one in each], ".2f")],
            [f"{label}: tokens/s", *sides([one.tokens_per_s for one in each], ",.1f", higher=True)],
        ]
    return Table(
        "Decode steps launched ahead (streams x tokens)",
        COLUMNS,
        rows,
        "A cache that is copied while it is updated would show as a peak as large as itself.",
    )


def waste_table(found: Sequence[Waste], lengths: Sequence[int]) -> Table:
    """Bytes held for a live token."""
    pages = [(w.held_bytes - w.tail_bytes) / w.rounded_bytes for w in found]
    rows = [
        ["held (MB)", *megabytes([w.held_bytes for w in found])],
        ["held / live", *sides([w.held_bytes / w.live_bytes for w in found], ".3f")],
        ["held without tails / live in whole pages", *sides(pages, ".3f")],
    ]
    text = ", ".join(f"{length:,}" for length in lengths)
    return Table(f"KV held for streams of {text} tokens", COLUMNS, rows)


def change_table(found: Sequence[Change], count: int, length: int) -> Table:
    """Bytes above what is held, in three kinds of steps."""
    rows = [
        ["no request joins or leaves", *megabytes([c.steady_bytes for c in found])],
        ["a short prompt joins", *megabytes([c.join_bytes for c in found])],
        ["it leaves", *megabytes([c.leave_bytes for c in found])],
    ]
    title = f"Peak memory (MB) above what is held, {count} streams of {length:,} tokens"
    return Table(title, COLUMNS, rows)


def megabytes(values: Sequence[int]) -> list[str]:
    """Bytes of both sides, in MB."""
    return sides([value / 1e6 for value in values], ",.2f")


CHUNK = 4096  # prompt tokens a step of mlxinfer


def _makers(model: Model, peer_model: object | None, tokens: int) -> list[Callable[[], Engine]]:
    """Ours has pages for `tokens` from the start, so that growth does not hide what is measured.

    And it prefills much at a time, as mlx-lm does, so that no stream is far ahead of the others.
    """
    pages = tokens // PAGE + 1
    makers: list[Callable[[], Engine]] = [
        lambda: OurEngine(model, num_pages=pages, prefill_chunk=CHUNK)
    ]
    if peer_model is not None:
        makers.append(lambda: PeerEngine(peer_model, max_batch=64))
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
        engines = [make() for make in _makers(model, peer_model, room)]
        decodes[count, length] = decode(engines, count, length, scale.steps, scale.rounds)
    everyone = _room(len(scale.lengths), max(scale.lengths), 0)
    wastes = [waste(make(), scale.lengths) for make in _makers(model, peer_model, everyone)]
    count, length = scale.crowd
    makers = _makers(model, peer_model, _room(count + 1, length, 0))
    changes = [change(make(), count, length) for make in makers]
    data = {
        "decode": [
            {"streams": c, "tokens": n, **_named(found)} for (c, n), found in decodes.items()
        ],
        "held": {"lengths": list(scale.lengths), **_named(wastes)},
        "join_and_leave": {"streams": count, "tokens": length, **_named(changes)},
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


def _named(found: Sequence[Any]) -> dict[str, Any]:
    return named([asdict(each) for each in found])
