"""The graph of a decode step as Metal would get it, ours and mlx-lm's. Builds graphs, runs none.

MLX's fused operations fall apart into small ones where there is no GPU, and custom kernels are
refused there, but for graphs that are traced. So the steps here are to be called in a trace, under
`as_on_metal`, where each of the fused operations stands as one of the same shape.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache.formats import lay_out
from ..cache.kv import KVCache
from ..cache.page_table import PageTable
from ..cache.segments import Segments, StepSegments, ints
from ..config import KVOptions
from ..engine.kernels import choose_kernels
from ..models import load
from .peer import load_peer_model, peer_caches

PAGE, SEALED, CONTEXT = 16, 32, 40  # tokens before the step: two pages and a tail
SEQUENCE_PAGES = SEALED // PAGE + 2
STEPS = PAGE // 2  # that a prepared step can be taken before its tail is full
FUSED = ("rms_norm", "rope", "scaled_dot_product_attention")

Graph = Callable[[mx.array], mx.array]  # (B,) tokens -> logits, lazy; each call is the next step


def our_steps(folder: Path, bits: int | None, requests: int) -> Graph:
    """Steps of a bfloat16 model with all its kernels; to be made and called under `as_on_metal`."""
    model = load(folder, dtype="bfloat16")
    specs, stored = lay_out(model.cache_specs, KVOptions(bits=(bits, bits)), key_bias=False)
    kernels = choose_kernels(model, specs, stored, frozenset)
    kernels.put_into(model)
    cache = KVCache(
        specs,
        bits=stored,
        dtype=model.activation_dtype,
        page_size=PAGE,
        max_batch=requests,
        prefill_chunk=64,
        budget_bytes=1 << 30,
        num_pages=SEQUENCE_PAGES * requests,
        kernel_layers=kernels.attention,
        heads=kernels.heads,
    )
    cache.make_room(requests)
    rows = range(requests)
    spans = Segments(
        [[PageTable(PAGE, pages=list(range(first, first + SEQUENCE_PAGES)))] for first in rows],
        ints(list(rows)),
        ints([CONTEXT] * requests),
        ints([1] * requests),
        ints([SEALED] * requests),
        ints(list(rows)),
    )

    def step(ids: mx.array) -> mx.array:
        nonlocal spans
        found = StepSegments.of([], [], spans)
        spans = spans.advance()
        positions = mx.array(found.positions)
        return model.logits(model(ids, positions, cache.begin_step(found)))

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


def build_times_us(step: Graph, requests: int, times: int = STEPS) -> list[float]:
    """CPU microseconds of this thread for each of some steps' graphs."""
    found: list[float] = []

    def steps(ids: mx.array) -> mx.array:
        graphs = []
        for _ in range(times):
            started = time.thread_time()
            graphs.append(step(ids))
            found.append((time.thread_time() - started) * 1e6)
        return graphs[-1]

    gc.collect()
    gc.disable()  # what others left is not this one's
    try:
        mx.export_function(lambda _: None, steps, mx.zeros((requests,), mx.int32))
    finally:
        gc.enable()
    return found


def whole(x: mx.array, *rest: Any, **options: Any) -> mx.array:
    """One operation that needs all its inputs."""
    needed = [a for a in (*rest, *options.values()) if isinstance(a, mx.array)]
    return mx.abs(mx.depends(x, needed) if needed else x)


def quick(x: mx.array, *rest: Any, **options: Any) -> mx.array:
    """One operation that takes no longer to make than the one it stands for."""
    return mx.abs(x)


@contextmanager
def as_on_metal(fused: Callable[..., mx.array] = whole) -> Iterator[None]:
    """Graphs as Metal would get them; `fused` stands for each of MLX's fused operations."""
    originals = {name: getattr(mx.fast, name) for name in FUSED}
    is_available = mx.metal.is_available
    for name in FUSED:
        setattr(mx.fast, name, fused)
    mx.metal.is_available = lambda: True
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(mx.fast, name, original)
        mx.metal.is_available = is_available
