"""`bench memory`: KV bytes copied and wasted, ours beside mlx-lm's.

MLX updates an array in place only where nothing else holds it, and operations in flight do. MLX
limits how many those are, so an engine that launches ahead copies its KV cache only where a whole
step has few; such copies show as memory above what is held between steps. Padding shows as bytes
held for a live token, and moving whole caches as memory while a request joins or leaves. Last, the
peak of a whole process whose KV cache is filled, beside what it was promised.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from benchmarks.checkpoints import Dense, random_prompt, write_checkpoint
from benchmarks.engines import Ask, Engine, Loaded, until_decoding
from benchmarks.processes import run_python
from benchmarks.tables import SIDES, Figures, named, sides
from mlxinfer.bench.report import Report, Table

WIDE = Dense(hidden=64, inner=128, layers=2, heads=4, kv_heads=4, head_dim=64, vocab=256)
DEEP = Dense(hidden=256, inner=512, layers=16, heads=16, kv_heads=16, head_dim=128, vocab=1024)
TOKEN_BYTES = WIDE.layers * 2 * WIDE.kv_heads * WIDE.head_dim * 4  # float32
PAGE = 16
CHUNK = 4096  # prompt tokens a step of mlxinfer: as many as mlx-lm has, so that no stream is ahead
COLUMNS = ["", *SIDES]
Pair = Sequence[Figures]  # of ours, and of mlx-lm


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many streams of how many tokens."""

    streams: tuple[tuple[int, int], ...] = ((1, 8192), (64, 1024))
    steps: int = 32
    rounds: int = 3
    lengths: tuple[int, ...] = (3000, 500, 10)
    crowd: tuple[int, int] = (15, 1024)  # requests that another joins
    max_memory: int = 300 << 20  # of the process


SMALL = Scale(
    streams=((2, 200),), steps=20, lengths=(120, 50, 10), crowd=(3, 100), max_memory=64 << 20
)


def peak_bytes(action: Callable[[], object]) -> int:
    """The most memory that MLX held during `action`, above what it held before."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return int(mx.get_peak_memory() - before)


def fill(engine: Engine, lengths: Sequence[int]) -> None:
    """Start a stream for each length and step until every one decodes."""
    prompts = [random_prompt(length, WIDE.vocab, i) for i, length in enumerate(lengths)]
    until_decoding(engine, [Ask.of(str(i), ids) for i, ids in enumerate(prompts)])


def settle(engine: Engine, steps: int = 2 * PAGE + 2) -> None:
    """Decode steps, after which rings are full and every kind of step was seen."""
    for _ in range(steps):
        engine.step()


def decode(
    engines: Sequence[Engine], count: int, length: int, steps: int, rounds: int
) -> list[Figures]:
    """Peak and speed of `steps` decode steps of streams that hold much KV.

    The sides alternate. `extra_bytes` is the peak above what was held before, the speed the median.
    """
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
    return [
        {"held_bytes": kv, "extra_bytes": more, "tokens_per_s": statistics.median(speed)}
        for kv, more, speed in zip(held, extra, speeds, strict=True)
    ]


def waste(engine: Engine, lengths: Sequence[int]) -> Figures:
    """Return the bytes that are held for `lengths` just after their first tokens.

    `live_bytes` is what the tokens themselves take, `rounded_bytes` the same in whole pages.
    """
    fill(engine, lengths)
    rounded = sum(-(-length // PAGE) * PAGE for length in lengths)
    return {
        "live_bytes": sum(lengths) * TOKEN_BYTES,
        "rounded_bytes": rounded * TOKEN_BYTES,
        "held_bytes": engine.running_bytes,
        "tail_bytes": engine.tail_bytes,
    }


def change(engine: Engine, count: int, length: int) -> Figures:
    """Peaks where no request joins, where one with a short prompt does, and where one leaves."""
    fill(engine, [length] * count)
    settle(engine)
    steady = peak_bytes(partial(settle, engine, 4))

    def until(there: bool) -> None:
        while ("new" in {token.request_id for token in engine.step()}) is not there:
            pass

    def join() -> None:
        engine.submit(Ask.of("new", random_prompt(PAGE, WIDE.vocab, 77), 4))
        until(True)

    joined = peak_bytes(join)
    left = peak_bytes(partial(until, False))
    return {"steady_bytes": steady, "join_bytes": joined, "leave_bytes": left}


def process(folder: Path, max_memory: int) -> Figures:
    """The peak of a process with a KV cache that was filled, above what Python and MLX take."""
    ran = run_python("-m", "benchmarks.filled", str(folder), str(max_memory))
    content = json.loads(ran.lines[-1])
    promised = content["weights_bytes"] + max_memory
    return {
        "promised_bytes": promised,
        "peak_bytes": ran.cost["peak_bytes"] - content["before_bytes"],
    }


def process_table(figures: Figures) -> Table:
    """The peak beside the promise."""
    peak, promised = figures["peak_bytes"], figures["promised_bytes"]
    rows = [
        ["weights and max_memory (MB)", f"{promised / 1e6:,.0f}"],
        ["peak (MB)", f"{peak / 1e6:,.0f}"],
        ["peak / promised", f"{peak / promised:.2f}"],
    ]
    return Table("A process of mlxinfer with a full KV cache", ["", "mlxinfer"], rows)


def decode_table(figures: Mapping[tuple[int, int], Pair]) -> Table:
    """Bytes and speed of decode steps, for each number of streams."""
    rows = []
    for (count, length), pair in figures.items():
        label = f"{count} x {length:,}"
        shares = [one["extra_bytes"] / one["held_bytes"] for one in pair]
        rates = [one["tokens_per_s"] for one in pair]
        rows += [
            [f"{label}: KV held (MB)", *megabytes(pair, "held_bytes")],
            [f"{label}: peak above it (MB)", *megabytes(pair, "extra_bytes")],
            [f"{label}: peak / KV held", *sides(shares, ".2f")],
            [f"{label}: tokens/s", *sides(rates, ",.1f", higher=True)],
        ]
    return Table(
        "Decode steps launched ahead (streams x tokens)",
        COLUMNS,
        rows,
        "A cache that is copied while it is updated would show as a peak as large as itself.",
    )


def waste_table(figures: Pair, lengths: Sequence[int]) -> Table:
    """Bytes held for a live token."""
    live = [one["held_bytes"] / one["live_bytes"] for one in figures]
    pages = [(one["held_bytes"] - one["tail_bytes"]) / one["rounded_bytes"] for one in figures]
    rows = [
        ["held (MB)", *megabytes(figures, "held_bytes")],
        ["held / live", *sides(live, ".3f")],
        ["held without tails / live in whole pages", *sides(pages, ".3f")],
    ]
    text = ", ".join(f"{length:,}" for length in lengths)
    return Table(f"KV held for streams of {text} tokens", COLUMNS, rows)


def change_table(figures: Pair, count: int, length: int) -> Table:
    """Bytes above what is held, in three kinds of steps."""
    rows = [
        ["no request joins or leaves", *megabytes(figures, "steady_bytes")],
        ["a short prompt joins", *megabytes(figures, "join_bytes")],
        ["it leaves", *megabytes(figures, "leave_bytes")],
    ]
    title = f"Peak memory (MB) above what is held, {count} streams of {length:,} tokens"
    return Table(title, COLUMNS, rows)


def megabytes(figures: Pair, name: str) -> list[str]:
    """Bytes of both sides, in MB."""
    return sides([one[name] / 1e6 for one in figures], ",.2f")


def run(*, small: bool, peer: bool) -> Report:
    """All four.

    Args:
        small: seconds instead of a minute.
        peer: also mlx-lm.
    """
    scale = SMALL if small else Scale()
    with TemporaryDirectory() as scratch:
        loaded = Loaded.of(write_checkpoint(Path(scratch) / "model", WIDE), peer=peer)
        whole = process(write_checkpoint(Path(scratch) / "deep", DEEP), scale.max_memory)

    def engines(count: int, length: int, steps: int = 0) -> Iterator[Engine]:
        """Ours has all pages from the start, so that growth does not hide what is measured.

        Each stream answers while the others are prefilled.
        """
        tokens = count * (length + count * length // (CHUNK // 2) + steps + 8 * PAGE)
        pages = tokens // PAGE + 1
        return loaded.engines(peer_batch=64, num_pages=pages, prefill_chunk=CHUNK)

    steps = scale.rounds * scale.steps
    decodes = {
        (c, n): decode(list(engines(c, n, steps)), c, n, scale.steps, scale.rounds)
        for c, n in scale.streams
    }
    every = engines(len(scale.lengths), max(scale.lengths))
    wastes = [waste(engine, scale.lengths) for engine in every]
    count, length = scale.crowd
    changes = [change(engine, count, length) for engine in engines(count + 1, length)]
    data = {
        "decode": [{"streams": c, "tokens": n, **named(one)} for (c, n), one in decodes.items()],
        "held": {"lengths": list(scale.lengths), **named(wastes)},
        "join_and_leave": {"streams": count, "tokens": length, **named(changes)},
        "process": whole,
    }
    tables = [
        decode_table(decodes),
        waste_table(wastes, scale.lengths),
        change_table(changes, count, length),
        process_table(whole),
    ]
    return Report("memory", tables, data)
