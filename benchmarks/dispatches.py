"""`bench dispatches`: operations that a GPU is handed for one token, ours beside mlx-lm's.

Counted in the traced graph of a decode step, as it would be on Metal: our kernels are in it, and
each of MLX's fused operations stands as one. What only looks at memory another way is not counted.
Without a GPU, MLX's fused operations fall apart and custom kernels are refused, except in graphs
that are traced: steps are built under `as_on_metal`, and none of them runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from benchmarks.checkpoints import Dense, Experts, write_checkpoint
from benchmarks.tables import SIDES, sides
from mlxinfer.bench.peer import load_peer_model, peer_module
from mlxinfer.bench.report import Report, Table
from mlxinfer.cache.inputs import Segments, StepMetadata, ints
from mlxinfer.cache.kv import KVCache
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache.pages import PageTable
from mlxinfer.config import KVOptions
from mlxinfer.engine.kernels import Kernels
from mlxinfer.engine.model_cache import attention_kernels
from mlxinfer.layers.step import Step
from mlxinfer.metal_kernels.variants import everywhere
from mlxinfer.models import load

PAGE, SEALED, CONTEXT = 16, 32, 40  # tokens before the step: two pages and a tail
SEQUENCE_PAGES = SEALED // PAGE + 2
FUSED = ("rms_norm", "rope", "scaled_dot_product_attention")

Graph = Callable[[mx.array], mx.array]  # (B,) tokens -> logits, lazy; each call is the next step


def our_steps(folder: Path, bits: int | None) -> Graph:
    """Steps of a bfloat16 model with all its kernels; to be made and called under `as_on_metal`."""
    model = load(folder, dtype="bfloat16")
    dtype, options = model.activation_dtype, KVOptions(bits=(bits, bits))
    layers = lay_out(model.cache_specs, options, dtype=dtype, key_bias=False)
    Kernels([*model.kernels(), *attention_kernels(model, layers)], everywhere)
    cache = KVCache(
        layers,
        page_size=PAGE,
        max_batch=1,
        prefill_chunk=64,
        budget_bytes=1 << 30,
        num_pages=SEQUENCE_PAGES,
    )
    cache.make_room(1)
    tables = [PageTable(PAGE, pages=list(range(SEQUENCE_PAGES))) for _ in cache.groups]
    row, one = ints([0]), ints([1])
    spans = Segments([tables], row, ints([CONTEXT]), one, ints([SEALED]), row, width=1)

    def step(ids: mx.array) -> mx.array:
        nonlocal spans
        result = StepMetadata([spans], [], spans.starts)
        spans = spans.at(spans.starts + 1)
        cache.begin_step(result)
        caches = dict(zip(model.mixers, cache.layers, strict=True))
        return model.logits(model(ids, Step(mx.array(result.positions), caches)))

    return step


def peer_steps(folder: Path, bits: int | None) -> Graph:
    """The same of mlx-lm; to be made before and called under `as_on_metal`.

    Its KV cache is quantised from the first token on, or plain.
    """
    model = load_peer_model(folder)
    model.set_dtype(mx.bfloat16)
    kinds = peer_module("mlx_lm.models.cache")
    caches = list(kinds.make_prompt_cache(model))
    if bits is not None:
        caches = [kinds.QuantizedKVCache(group_size=64, bits=bits) for _ in model.layers]
    mx.eval(model(mx.zeros((1, CONTEXT), mx.int32), cache=caches))
    return lambda ids: model(ids[:, None], cache=caches)


def traced(function: Graph, argument: mx.array) -> list[str]:
    """The operations of a function's graph by name."""
    collected: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            collected.append(event["name"])

    mx.export_function(note, function, argument)
    return collected


def whole(x: mx.array, *rest: Any, **options: Any) -> mx.array:
    """One operation that needs all its inputs."""
    needed = [a for a in (*rest, *options.values()) if isinstance(a, mx.array)]
    return mx.abs(mx.depends(x, needed) if needed else x)


@contextmanager
def as_on_metal() -> Iterator[None]:
    """Graphs as Metal would get them; one operation stands for each of MLX's fused ones."""
    fused: dict[str, Any] = dict.fromkeys(FUSED, whole)
    with patch.multiple(mx.fast, **fused), patch.object(mx.metal, "is_available", lambda: True):
        yield


FEW, MORE = 2, 3  # layers: what one costs is the difference
MODEL = Dense(hidden=128, inner=256, layers=FEW, heads=8, kv_heads=2, head_dim=64, vocab=512)
MIXTURE = Experts(**{**asdict(MODEL), "inner": 64}, experts=8, chosen=2)
VIEWS = frozenset(
    """AsStrided Broadcast BroadcastAxes Contiguous Depends ExpandDims Flatten Full Reshape Slice
    Split Squeeze StopGradient Transpose Unflatten View""".split()  # noqa: SIM905
)
BITS: tuple[int | None, ...] = (None, 8)


FOUR_BITS = {"group_size": 64, "bits": 4}
COUNTED: dict[str, tuple[Dense, dict[str, int] | None]] = {
    "dense": (MODEL, None),
    "dense, 4 bits": (MODEL, FOUR_BITS),
    "experts": (MIXTURE, None),
    "experts, 4 bits": (MIXTURE, FOUR_BITS),
}
Counts = dict[tuple[str, int | None], list[dict[str, Any]]]


def run(*, peer: bool) -> Report:
    """Plain and quantised KV, ours and mlx-lm's."""
    counts: Counts = {}
    with TemporaryDirectory() as scratch:
        for name, (sizes, quantize) in COUNTED.items():
            folder = Path(scratch) / name
            counted = [
                write_checkpoint(folder / str(n), replace(sizes, layers=n), quantize=quantize)
                for n in (FEW, MORE)
            ]
            # Before the step mlx-lm must run, which its experts in 16 bits do not on a CPU.
            sides = (True, False) if peer and name.startswith("dense") else (True,)
            for bits in BITS:
                counts[name, bits] = [_count(counted, bits, ours=ours) for ours in sides]
    data = [
        {"model": name, "kv_bits": bits, "counts": value} for (name, bits), value in counts.items()
    ]
    return Report("dispatches", [_count_table(counts)], {"dispatches": data})


def _count(folders: Sequence[Path], bits: int | None, *, ours: bool) -> dict[str, Any]:
    """Dispatches of a layer, and beside the layers: embedding, last norm, logits, masks."""
    few, more = [_operations(folder, bits, ours=ours) for folder in folders]
    layer = more - few
    per_layer = layer.total()
    beside = few.total() - FEW * per_layer
    return {"per_layer": per_layer, "beside": beside, "kinds": dict(layer)}


def _operations(folder: Path, bits: int | None, *, ours: bool) -> "Counter[str]":
    """How often each is in the graph of a step."""
    theirs = None if ours else peer_steps(folder, bits)
    with as_on_metal():
        step = theirs or our_steps(folder, bits)
        return Counter(name for name in traced(step, mx.array([7])) if name not in VIEWS)


def _count_table(counts: Counts) -> Table:
    rows = []
    for (name, bits), value in counts.items():
        for field, label in (("per_layer", "a layer"), ("beside", "beside the layers")):
            cells = sides([count[field] for count in value])
            rows.append([name, "plain" if bits is None else str(bits), label, *cells])
    return Table(
        "Dispatches of one decode step",
        ["model", "kv_bits", "", *SIDES],
        rows,
        "From the traced graph, with Metal kernels and MLX's fused operations; elementwise "
        "operations one by one, views not at all. Counted on this machine, not run on a GPU.",
    )
