"""`bench dispatches`: operations that a GPU is handed for one token, ours beside mlx-lm's.

Counted in the traced graph of a decode step, as it would be on Metal: our kernels are in it, and
each of MLX's fused operations stands as one. What only looks at memory another way is not counted.
The same graph is built again and again for the second question: how long that keeps the host busy.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from .checkpoints import Dense, write_checkpoint
from .metal_graph import as_on_metal, build_times_us, our_steps, peer_steps, quick, traced
from .report import Report, Table, ratio

FEW, MORE = 2, 3  # layers: what one costs is the difference
MODEL = Dense(hidden=128, inner=256, layers=FEW, heads=8, kv_heads=2, head_dim=64, vocab=512)
DEEP = replace(MODEL, layers=28)
VIEWS = frozenset(
    """AsStrided Broadcast BroadcastAxes Contiguous Depends ExpandDims Flatten Full Reshape Slice
    Split Squeeze StopGradient Transpose Unflatten View""".split()  # noqa: SIM905
)
BITS: tuple[int | None, ...] = (None, 8)


@dataclass(frozen=True, slots=True)
class Count:
    """Dispatches of one token."""

    per_layer: int
    beside: int  # embedding, last norm, logits, masks
    kinds: dict[str, int] = field(default_factory=dict)  # of a layer


def run(
    *, peer: bool = True, requests: Sequence[int] = (1, 8), deep: Dense = DEEP, rounds: int = 7
) -> Report:
    """Plain and quantised KV, ours and mlx-lm's."""
    with TemporaryDirectory() as scratch:
        counted = [
            write_checkpoint(Path(scratch) / str(layers), replace(MODEL, layers=layers))
            for layers in (FEW, MORE)
        ]
        counts = {bits: _counts(counted, bits, peer=peer) for bits in BITS}
        folder = write_checkpoint(Path(scratch) / "deep", deep)
        for bits in BITS:  # until the heap of this process has grown to what graphs need
            _built(folder, bits, max(requests), peer=peer, rounds=2)
        built = {
            (bits, n): _built(folder, bits, n, peer=peer, rounds=rounds)
            for bits in BITS
            for n in requests
        }
    return Report(
        "dispatches",
        [_count_table(counts), _build_table(built, deep.layers)],
        {
            "dispatches": [
                {"kv_bits": bits, "counts": [asdict(count) for count in found]}
                for bits, found in counts.items()
            ],
            "build": [
                {"kv_bits": bits, "requests": n, "build_us": found}
                for (bits, n), found in built.items()
            ],
        },
    )


def _counts(folders: Sequence[Path], bits: int | None, *, peer: bool) -> list[Count]:
    """Ours, and mlx-lm's."""
    found = []
    for ours in (True, False) if peer else (True,):
        few, more = [_operations(folder, bits, ours=ours) for folder in folders]
        layer = more - few
        per_layer = layer.total()
        found.append(Count(per_layer, few.total() - FEW * per_layer, dict(layer)))
    return found


def _operations(folder: Path, bits: int | None, *, ours: bool) -> "Counter[str]":
    """How often each is in the graph of a step."""
    theirs = None if ours else peer_steps(folder, bits, 1)
    with as_on_metal():
        step = theirs or our_steps(folder, bits, 1)
        return Counter(name for name in traced(step, mx.array([7])) if name not in VIEWS)


def _built(
    folder: Path, bits: int | None, requests: int, *, peer: bool, rounds: int
) -> list[float]:
    """Median microseconds of our graph, and of mlx-lm's, in turns."""
    times: list[list[float]] = [[], []] if peer else [[]]
    for _ in range(rounds):
        theirs = [peer_steps(folder, bits, requests)] if peer else []
        with as_on_metal(quick):
            for found, step in zip(
                times, [our_steps(folder, bits, requests), *theirs], strict=True
            ):
                found += build_times_us(step, requests)[1:]  # the first works out what lasts
    return [statistics.median(found) for found in times]


def _count_table(counts: dict[int | None, list[Count]]) -> Table:
    rows = []
    for bits, found in counts.items():
        rows += [
            [_named(bits), "a layer", *_row([count.per_layer for count in found])],
            [_named(bits), "beside the layers", *_row([count.beside for count in found])],
        ]
    return Table(
        "Dispatches of one decode step",
        ["kv_bits", "", "mlxinfer", "mlx-lm", "ratio"],
        rows,
        "From the traced graph, with Metal kernels and MLX's fused operations; elementwise "
        "operations one by one, views not at all. Counted on this machine, not run on a GPU.",
    )


def _build_table(built: dict[tuple[int | None, int], list[float]], layers: int) -> Table:
    return Table(
        f"Main-thread CPU us to build that graph, {layers} layers",
        ["kv_bits", "requests", "mlxinfer", "mlx-lm", "ratio"],
        [[_named(bits), str(n), *_row(found)] for (bits, n), found in built.items()],
        "With page tables, cache writes and logits. In a trace: each of MLX's fused operations "
        "stands as the quickest there is, kernels are MLX's own calls. Not measured on a Mac.",
    )


def _named(bits: int | None) -> str:
    return "plain" if bits is None else str(bits)


def _row(values: Sequence[float]) -> list[str]:
    """Ours, theirs and how many times less ours is."""
    cells = [f"{value:,.0f}" for value in values]
    better = ratio(values[1], values[0]) if len(values) > 1 else "-"
    return [*cells, *["-"] * (2 - len(cells)), better]
