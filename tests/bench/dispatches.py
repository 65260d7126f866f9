"""`bench dispatches`: operations that a GPU is handed for one token, ours beside mlx-lm's.

Counted in the traced graph of a decode step, as it would be on Metal: our kernels are in it, and
each of MLX's fused operations stands as one. What only looks at memory another way is not counted.
Without a GPU, MLX's fused operations fall apart and custom kernels are refused, except in graphs
that are traced: steps are built under `as_on_metal`, and none of them runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.bench.report import Report, Table
from mlxinfer.cache.inputs import Segments, StepMetadata, ints
from mlxinfer.cache.kv import KVCache
from mlxinfer.cache.layout import kernel_uses, lay_out
from mlxinfer.cache.pages import PageTable
from mlxinfer.config import KVOptions
from mlxinfer.engine.kernels import Kernels
from mlxinfer.layers.step import Step
from mlxinfer.models import load
from tests.bench.checkpoints import Dense, Experts, write_checkpoint
from tests.bench.peer import peer_caches
from tests.bench.tables import SIDES, sides

PAGE, SEALED, CONTEXT = 16, 32, 40  # tokens before the step: two pages and a tail
SEQUENCE_PAGES = SEALED // PAGE + 2
FUSED = ("rms_norm", "rope", "scaled_dot_product_attention")

Graph = Callable[[mx.array], mx.array]  # (B,) tokens -> logits, lazy; each call is the next step


def our_steps(folder: Path, bits: int | None, requests: int) -> Graph:
    """Steps of a bfloat16 model with all its kernels; to be made and called under `as_on_metal`."""
    model = load(folder, dtype="bfloat16")
    dtype, options = model.activation_dtype, KVOptions(bits=(bits, bits))
    layers = lay_out(model.cache_specs, options, dtype=dtype, key_bias=False)
    pairs = list(zip(layers, model.mixers, strict=True))
    Kernels([*model.kernels(), *kernel_uses(pairs)], frozenset)
    cache = KVCache(
        layers,
        page_size=PAGE,
        max_batch=requests,
        prefill_chunk=64,
        budget_bytes=1 << 30,
        num_pages=SEQUENCE_PAGES * requests,
    )
    cache.make_room(requests)
    rows = range(requests)
    spans = Segments(
        [
            [PageTable(PAGE, pages=list(range(i, i + SEQUENCE_PAGES))) for _ in cache.groups]
            for i in rows
        ],
        ints(list(rows)),
        ints([CONTEXT] * requests),
        ints([1] * requests),
        ints([SEALED] * requests),
        ints(list(rows)),
        width=1,
    )

    def step(ids: mx.array) -> mx.array:
        nonlocal spans
        found = StepMetadata([spans], [], spans.starts)
        spans = spans.advance()
        cache.begin_step(found)
        caches = dict(zip(model.mixers, cache.layers, strict=True))
        return model.logits(model(ids, Step(mx.array(found.positions), caches)))

    return step


def peer_steps(folder: Path, bits: int | None, requests: int) -> Graph:
    """The same of mlx-lm; to be made before and called under `as_on_metal`."""
    model = load_peer_model(folder)
    model.set_dtype(mx.bfloat16)
    caches = peer_caches(model, bits, requests)
    mx.eval(model(mx.zeros((requests, CONTEXT), mx.int32), cache=caches))
    return lambda ids: model(ids[:, None], cache=caches)


def traced(function: Graph, argument: mx.array) -> list[str]:
    """The operations of a function's graph by name."""
    found: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            found.append(event["name"])

    mx.export_function(note, function, argument)
    return found


def whole(x: mx.array, *rest: Any, **options: Any) -> mx.array:
    """One operation that needs all its inputs."""
    needed = [a for a in (*rest, *options.values()) if isinstance(a, mx.array)]
    return mx.abs(mx.depends(x, needed) if needed else x)


@contextmanager
def as_on_metal() -> Iterator[None]:
    """Graphs as Metal would get them; one operation stands for each of MLX's fused ones."""
    originals = {name: getattr(mx.fast, name) for name in FUSED}
    is_available = mx.metal.is_available
    for name in FUSED:
        setattr(mx.fast, name, whole)
    mx.metal.is_available = lambda: True
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(mx.fast, name, original)
        mx.metal.is_available = is_available


FEW, MORE = 2, 3  # layers: what one costs is the difference
MODEL = Dense(hidden=128, inner=256, layers=FEW, heads=8, kv_heads=2, head_dim=64, vocab=512)
MIXTURE = Experts(**{**asdict(MODEL), "inner": 64}, experts=8, chosen=2)
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


FOUR_BITS = {"group_size": 64, "bits": 4}
COUNTED: dict[str, tuple[Dense, dict[str, int] | None]] = {
    "dense": (MODEL, None),
    "dense, 4 bits": (MODEL, FOUR_BITS),
    "experts": (MIXTURE, None),
    "experts, 4 bits": (MIXTURE, FOUR_BITS),
}
Counts = dict[tuple[str, int | None], list[Count]]


def run(*, peer: bool = True) -> Report:
    """Plain and quantised KV, ours and mlx-lm's."""
    counts: Counts = {}
    with TemporaryDirectory() as scratch:
        for name, (sizes, quantize) in COUNTED.items():
            counted = [
                write_checkpoint(
                    Path(scratch) / name / str(n), replace(sizes, layers=n), quantize=quantize
                )
                for n in (FEW, MORE)
            ]
            # Before the step mlx-lm must run, which its experts in 16 bits do not on a CPU.
            with_peer = peer and not isinstance(sizes, Experts)
            counts |= {(name, bits): _counts(counted, bits, peer=with_peer) for bits in BITS}
    data = [
        {"model": name, "kv_bits": bits, "counts": [asdict(count) for count in found]}
        for (name, bits), found in counts.items()
    ]
    return Report("dispatches", [_count_table(counts)], {"dispatches": data})


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


def _count_table(counts: Counts) -> Table:
    rows = []
    for (name, bits), found in counts.items():
        own = [name, _named(bits)]
        rows += [
            [*own, "a layer", *sides([count.per_layer for count in found])],
            [*own, "beside the layers", *sides([count.beside for count in found])],
        ]
    return Table(
        "Dispatches of one decode step",
        ["model", "kv_bits", "", *SIDES],
        rows,
        "From the traced graph, with Metal kernels and MLX's fused operations; elementwise "
        "operations one by one, views not at all. Counted on this machine, not run on a GPU.",
    )


def _named(bits: int | None) -> str:
    return "plain" if bits is None else str(bits)
