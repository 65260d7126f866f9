"""Prefill chunks in plain MLX: blocks of keys change nothing, and bound what a chunk takes."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import Bits, layer_of

from mlxinfer.cache import chunks
from mlxinfer.cache.chunks import Chunk
from mlxinfer.cache.keys_values import KeyValueLayer
from mlxinfer.cache.pages import AttentionWindow
from mlxinfer.cache_specs import KVSpec
from mlxinfer.metal_kernels import prompt_attention
from mlxinfer.metal_kernels.paged_attention import Softmax
from mlxinfer.metal_kernels.prompt_attention import BLOCKS, WHOLE

HEADS, KV_HEADS, DIM = 4, 2, 64
PLAIN: Bits = (None, None)


def chunk(start: int, count: int, window: AttentionWindow, runs: Sequence[int]) -> Chunk:
    """Tokens [start, start + count) with keys in layer slots from `runs` on, 200 at a time."""
    ranges = window.ranges(start, start + count)
    positions = np.concatenate([np.arange(*part) for part in ranges])
    reads = [
        (runs[i // 200], runs[i // 200] + min(200, len(positions) - i))
        for i in range(0, len(positions), 200)
    ]
    return Chunk(slice(0, count), [], reads, start, ranges, window)


def filled_layer(num_tokens: int, bits: Bits = PLAIN, dim: int = DIM) -> KeyValueLayer:
    spec = KVSpec(KV_HEADS, dim, dim)
    layer: KeyValueLayer = layer_of(spec, bits, num_pages=num_tokens // 16, num_slots=1)
    vectors = mx.random.normal((num_tokens, KV_HEADS, dim), key=mx.random.key(1))
    for plane in layer.planes:
        plane.write_pages([(0, num_tokens)], 0, plane.fmt.encode(vectors))
    mx.eval(layer.arrays())
    return layer


@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow(size=150, sinks=7)])
@pytest.mark.parametrize("bits", [PLAIN, (8, 4)])
@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_of_keys_change_nothing(
    window: AttentionWindow, bits: Bits, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = filled_layer(2_000, bits)
    plan = chunk(555, 300, window, [1_000, 400, 0, 1_400, 800])
    queries = mx.random.normal((300, HEADS, DIM), key=mx.random.key(2))
    softmax = Softmax(0.2, mx.linspace(-1, 1, HEADS) if sinks else None)
    whole = plan.attend(layer, queries, softmax)
    for module in (chunks, prompt_attention):
        monkeypatch.setattr(module, "KEY_BLOCK", 64)
    attended = plan.attend(layer, queries, softmax)
    assert mx.allclose(attended, whole, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("bits", [pytest.param(PLAIN, marks=pytest.mark.ci), (8, 8)])
def test_memory_does_not_grow_with_the_context(bits: Bits) -> None:
    dim, count = 128, 128
    layer = filled_layer(9_600, bits, dim)
    queries = mx.random.normal((count, HEADS, dim), key=mx.random.key(2))
    mx.eval(queries)

    def transient_bytes(start: int) -> int:
        plan = chunk(start, count, AttentionWindow(), [i * 200 for i in range(48)])
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(plan.attend(layer, queries, Softmax(0.1)))
        return mx.get_peak_memory() - held

    # MLX gives memory back when it likes: one may be a fifth off, and growth would be 2.25 times.
    short = max(transient_bytes(4_000) for _ in range(3))
    long = min(transient_bytes(9_000) for _ in range(3))
    assert long <= 1.25 * short
    assert long <= 48 << 20


@pytest.mark.parametrize(
    ("dim", "bits", "count", "most_bytes", "expected"),
    [
        (64, PLAIN, 300, 0, (WHOLE, BLOCKS)),  # read as they are stored: nothing is decoded
        (64, (8, 4), 300, 800 * 2 * KV_HEADS * 64 * 4, (WHOLE, BLOCKS)),
        (64, (8, 4), 300, 800 * 2 * KV_HEADS * 64 * 4 - 1, (BLOCKS,)),
        (256, PLAIN, 300, 0, (BLOCKS, WHOLE)),  # MLX has it, and does without by itself
        (256, PLAIN, 8, 0, (BLOCKS,)),
        (112, PLAIN, 300, 0, (BLOCKS,)),
    ],
)
def test_all_keys_at_once_need_a_kernel_of_mlx_and_room(
    dim: int,
    bits: Bits,
    count: int,
    most_bytes: int,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_attention, "MOST_DECODED", most_bytes)
    layer, softmax = filled_layer(2_000, bits, dim), Softmax(0.2)
    plan = chunk(800 - count, count, AttentionWindow(), [0, 200, 400, 600])
    assert plan.ways_of(layer, dim, softmax) == (BLOCKS,), "without Metal all would keep scores"
    monkeypatch.setattr(chunks.mx.metal, "is_available", lambda: True)
    assert plan.ways_of(layer, dim, softmax) == expected
    assert plan.ways_of(layer, dim, softmax._replace(soft_cap=2.0)) == (BLOCKS,)
    behind = chunk(500, 300, AttentionWindow(size=150), [0, 200, 400])
    assert behind.ways_of(layer, dim, softmax) == (BLOCKS,), "MLX's causal mask has no window"
