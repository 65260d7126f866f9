"""`bench dispatches`: operations that a GPU is handed for one token, ours beside mlx-lm's.

Counted in the traced graph of a decode step, as it would be on Metal: our kernels are in it, and
each of MLX's fused operations stands as one. What only looks at memory another way is not counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from ..cache.kv import KVCache
from ..cache.layout import lay_out
from ..cache.pages import PageTable
from ..cache.spans import StepSpans
from ..config import KVOptions
from ..engine.kernels import choose_kernels
from ..models import load
from .checkpoints import Dense, write_checkpoint
from .peer import load_peer_model, peer_caches
from .report import Report, Table, ratio

PAGE, CONTEXT = 16, 40  # tokens before the one that is traced: two pages and a tail
FEW, MORE = 2, 3  # layers: what one costs is the difference
MODEL = Dense(hidden=128, inner=256, layers=FEW, heads=8, kv_heads=2, head_dim=64, vocab=512)
VIEWS = frozenset(
    """AsStrided Broadcast BroadcastAxes Contiguous Depends ExpandDims Flatten Full Reshape Slice
    Split Squeeze StopGradient Transpose Unflatten View""".split()  # noqa: SIM905
)
FUSED = ("rms_norm", "rope", "scaled_dot_product_attention")
BITS: tuple[int | None, ...] = (None, 8)


@dataclass(slots=True)
class Step:
    """One token of one sequence, as the KV cache sees it."""

    tables: list[PageTable]
    row: int = 0
    start: int = CONTEXT
    num_tokens: int = 1
    sealed: int = CONTEXT - CONTEXT % PAGE
    slot: int = 0

    @property
    def stop(self) -> int:
        """One past its position."""
        return self.start + 1


@dataclass(frozen=True, slots=True)
class Count:
    """Dispatches of one token."""

    per_layer: int
    beside: int  # embedding, last norm, logits, masks
    kinds: dict[str, int] = field(default_factory=dict)  # of a layer


def run(*, peer: bool = True) -> Report:
    """Plain and quantised KV, ours and mlx-lm's."""
    rows, data = [], []
    with TemporaryDirectory() as scratch:
        folders = [
            write_checkpoint(Path(scratch) / str(layers), replace(MODEL, layers=layers))
            for layers in (FEW, MORE)
        ]
        for bits in BITS:
            counts = [_count([_trace_ours(folder, bits) for folder in folders])]
            if peer:
                counts.append(_count([_trace_peer(folder, bits) for folder in folders]))
            data.append({"kv_bits": bits, "counts": [asdict(count) for count in counts]})
            rows += _rows("plain" if bits is None else str(bits), counts)
    table = Table(
        "Dispatches of one decode step",
        ["kv_bits", "", "mlxinfer", "mlx-lm", "ratio"],
        rows,
        "From the traced graph, with Metal kernels and MLX's fused operations; elementwise "
        "operations one by one, views not at all. Counted on this machine, not run on a GPU.",
    )
    return Report("dispatches", [table], {"dispatches": data})


def _rows(label: str, counts: Sequence[Count]) -> list[list[str]]:
    rows = []
    for what, values in (
        ("a layer", [count.per_layer for count in counts]),
        ("beside the layers", [count.beside for count in counts]),
    ):
        cells = [str(value) for value in values]
        better = ratio(values[1], values[0]) if len(values) > 1 else "-"
        rows.append([label, what, *cells, *["-"] * (2 - len(cells)), better])
    return rows


def _count(graphs: Sequence["Counter[str]"]) -> Count:
    few, more = graphs
    layer = more - few
    per_layer = layer.total()
    return Count(per_layer, few.total() - FEW * per_layer, dict(layer))


def _trace_ours(folder: Path, bits: int | None) -> "Counter[str]":
    with _as_on_metal():
        model = load(folder, dtype="bfloat16")
        specs, stored = lay_out(model.kv_specs, KVOptions(bits=(bits, bits)), key_bias=False)
        kernels = choose_kernels(model, specs, stored, frozenset)
        cache = KVCache(
            specs,
            bits=stored,
            dtype=model.activation_dtype,
            page_size=PAGE,
            max_batch=1,
            prefill_chunk=64,
            budget_bytes=1 << 26,
            num_pages=4,
            kernel_layers=kernels.attention,
            heads=kernels.heads,
        )
        span = Step([PageTable(PAGE, pages=[2, 0, 1])])

        def step(ids: mx.array) -> mx.array:
            positions = mx.array([CONTEXT], mx.int32)
            return model.logits(model(ids, positions, cache.begin_step(StepSpans.of([span], []))))

        return traced(step, mx.array([7], mx.int32))


def _trace_peer(folder: Path, bits: int | None) -> "Counter[str]":
    model = load_peer_model(folder)
    model.set_dtype(mx.bfloat16)
    caches = peer_caches(model, bits)
    mx.eval(model(mx.zeros((1, CONTEXT), mx.int32), cache=caches))
    with _as_on_metal():
        return traced(lambda ids: model(ids, cache=caches), mx.array([[7]], mx.int32))


def traced(function: Callable[[mx.array], mx.array], argument: mx.array) -> "Counter[str]":
    """The operations of a function's graph by name, views left out."""
    found: Counter[str] = Counter()

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] not in VIEWS:
            found[event["name"]] += 1

    mx.export_function(note, function, argument)
    return found


def _whole(x: mx.array, *rest: Any, **options: Any) -> mx.array:
    """One operation that needs all its inputs."""
    needed = [a for a in (*rest, *options.values()) if isinstance(a, mx.array)]
    return mx.abs(mx.depends(x, needed) if needed else x)


@contextmanager
def _as_on_metal() -> Iterator[None]:
    """Graphs as Metal would get them: MLX's fused operations whole, which elsewhere fall apart.

    They stand as one operation each, of the same shape; nothing of it is ever run.
    """
    originals = {name: getattr(mx.fast, name) for name in FUSED}
    is_available = mx.metal.is_available
    for name in FUSED:
        setattr(mx.fast, name, _whole)
    mx.metal.is_available = lambda: True
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(mx.fast, name, original)
        mx.metal.is_available = is_available
