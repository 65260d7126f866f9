"""Pages are gathered in blocks of sequences: the attention is that of each sequence by itself."""

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import PAGE, Bits, fill, layer_of, prepare
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache import gathered
from mlxinfer.cache.inputs import Segments, StepMetadata
from mlxinfer.cache.keys_values import KeyValueLayer
from mlxinfer.cache.pages import AttentionWindow, PageTable
from mlxinfer.cache_specs import KVSpec
from mlxinfer.metal_kernels.gathered_attention import attention_weights
from mlxinfer.metal_kernels.paged_attention import HIDDEN, Softmax

HEADS, GROUP, DIM = 2, 3, 32
NUM_PAGES = 80


def filled_layer(window: AttentionWindow, bits: Bits, num_slots: int) -> KeyValueLayer:
    """A layer with noise in its pages and tails."""
    spec = KVSpec(HEADS, DIM, DIM, window.size, window.sinks)
    layer: KeyValueLayer = layer_of(spec, bits, num_pages=NUM_PAGES, num_slots=num_slots)
    fill(layer, seed=5)
    return layer


def spans_of(
    draws: list[tuple[int, int, int]], window: AttentionWindow, *, scattered: bool
) -> Segments:
    """Spans of (sealed pages, tokens in the tail before, new tokens) each, in flat order."""
    free = list(range(NUM_PAGES))
    if scattered:
        free = [*free[::2], *free[1::2]]
    tables, starts, sealed = [], [], []
    for num_pages, in_tail, _ in draws:
        kept = window.kept_pages(PAGE)
        pages, free = free[: num_pages + 3], free[num_pages + 3 :]
        table = PageTable(PAGE, num_kept=kept, kept=pages[:kept], pages=pages[kept:])
        start = num_pages * PAGE + in_tail
        table.drop_before(min(window.first_page(start, PAGE), num_pages))
        tables.append([table])
        starts.append(start)
        sealed.append(num_pages * PAGE)
    counts = np.array([count for *_, count in draws], np.int32)
    return Segments(
        tables,
        rows=(np.cumsum(counts) - counts).astype(np.int32),
        starts=np.array(starts, np.int32),
        counts=counts,
        sealed=np.array(sealed, np.int32),
        slots=np.arange(len(draws), dtype=np.int32),
        width=int(counts.max()),
    )


def attend(spans: Segments, layer: KeyValueLayer, window: AttentionWindow, limit: int) -> mx.array:
    """What one step's attention gives, in flat order, if `limit` pages may be gathered together."""
    token_bytes = 2 * HEADS * DIM * 4
    positions = spans.tokens()[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "BLOCK_BYTES", limit * PAGE * token_bytes)
        prepare(layer, StepMetadata([spans], [], positions), window)
    queries, keys, values, sinks = inputs(len(positions))
    return layer.attend(queries, keys, values, Softmax(0.2, sinks))


def inputs(count: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Queries, keys and values of so many tokens, and sink logits."""
    rng = np.random.default_rng(9)
    queries, keys, values = (
        mx.array(rng.standard_normal((count, heads, DIM), dtype=np.float32))
        for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    return queries, keys, values, mx.array(rng.standard_normal(HEADS * GROUP, dtype=np.float32))


def dense(spans: Segments, layer: KeyValueLayer, window: AttentionWindow) -> mx.array:
    """The same by definition: one token after the other over what it sees; `layer` has the step."""
    queries, *_, sinks = inputs(len(spans.tokens()[0]))
    tails = layer.read_tails(slice(0, len(spans)))
    outputs = []
    rows, slots, positions = (part.tolist() for part in spans.tokens())
    for row, slot, position in zip(rows, slots, positions, strict=True):
        sealed = int(spans.sealed[slot])
        keys = np.arange(position + 1, dtype=np.int32)
        seen = keys[window.sees(np.int32([position]), keys)]
        table, new = spans.tables[slot][0], mx.array(seen[seen >= sealed] % (2 * PAGE))
        numbers = np.frombuffer(table.numbers_before(sealed), np.int32)
        old = seen[seen < sealed]
        places = mx.array(numbers[old // PAGE] * PAGE + old % PAGE)
        keys_values = [
            mx.concatenate(
                [plane.decode([part[:, places] for part in plane.pages]), tail[slot][:, new]],
                axis=1,
            )
            for plane, tail in zip((layer.keys, layer.values), tails, strict=True)
        ]
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                layer.rotate(queries[row : row + 1])[:, :, None],
                *(part[None] for part in keys_values),
                scale=0.2,
                sinks=sinks,
            ).reshape(1, -1)
        )
    return layer.restored(mx.concatenate(outputs))


draws = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 15), st.integers(1, 4)), min_size=1, max_size=6
)


@given(
    draws=draws,
    single=st.booleans(),
    window=st.sampled_from(
        [
            AttentionWindow(),
            AttentionWindow(size=20),
            AttentionWindow(size=40, sinks=3),
            AttentionWindow(size=7),
        ]
    ),
    bits=st.sampled_from([(None, None), (8, 8), (8, 4), (8, None), (None, 8)]),
    limit=st.sampled_from([1, 2, 3, 100]),
    scattered=st.booleans(),
)
def test_as_each_token_by_itself(
    draws: list[tuple[int, int, int]],
    single: bool,
    window: AttentionWindow,
    bits: Bits,
    limit: int,
    scattered: bool,
) -> None:
    if single:
        draws = [(pages, in_tail, 1) for pages, in_tail, _ in draws]
    spans = spans_of(draws, window, scattered=scattered)
    layer = filled_layer(window, bits, len(draws))
    expected = None
    for way in ("first", "last"):  # scores kept, and MLX's own attention
        if way == "last":
            layer.fastest = lambda rows, load, ways: ways[-1]
        attended = attend(spans, layer, window, limit)
        expected = dense(spans, layer, window) if expected is None else expected
        assert mx.allclose(attended, expected, rtol=1e-4, atol=1e-5).item(), way


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_another_sequence_left_stays_behind_the_padding(place: int, fused: bool) -> None:
    """Not even what is no number: its weight is 0, but 0 times that is none either."""
    window, layer = AttentionWindow(), filled_layer(AttentionWindow(), (None, None), 3)
    layer.fastest = lambda rows, load, ways: ways[-1] if fused else ways[0]
    draws = [(1, 5, 1), (2, 0, 1)]
    draws.insert(place, (4, 2, 1))
    spans, sound = spans_of(draws, window, scattered=False), [i for i in range(3) if i != place]
    for plane in (layer.keys, layer.values):
        (pages,) = plane.pages
        held = [run for i in sound for run in spans.tables[i][0].runs(0, draws[i][0] * PAGE)]
        broken = np.full(pages.shape, np.nan, np.float32)
        for start, stop in held:
            broken[:, start:stop] = np.array(pages[:, start:stop])
        plane.pages[0] = mx.array(broken)
    attended = attend(spans, layer, window, limit=100)
    assert mx.isnan(attended[place]).all().item(), "it has nothing else"
    assert not mx.isnan(attended[mx.array(sound)]).any().item()


def test_parts_are_found_again_while_only_tokens_join() -> None:
    spans = spans_of(
        [(4, 2, 1), (1, 5, 1), (2, 0, 1), (0, 3, 1)], AttentionWindow(), scattered=False
    )
    for step in range(3):
        for limit in (2, 100):
            layer = filled_layer(AttentionWindow(), (None, None), 4)
            fresh = spans_of(
                [(4, 2 + step, 1), (1, 5 + step, 1), (2, step, 1), (0, 3 + step, 1)],
                AttentionWindow(),
                scattered=False,
            )
            expected = attend(
                fresh, filled_layer(AttentionWindow(), (None, None), 4), AttentionWindow(), limit=0
            )
            assert mx.allclose(
                attend(spans, layer, AttentionWindow(), limit), expected, atol=1e-6
            ).item()
        spans = spans.at(spans.starts + 1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_token_scores_the_same_in_the_tail_and_in_a_page(dtype: mx.Dtype) -> None:
    """When it moves depends on the other sequences; what it gives must not, in 16 bits either."""
    rng = np.random.default_rng(3)
    queries, keys = (
        mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
        for shape in ((1, 4, 64), (1, 2, 2 * PAGE, 64))
    )
    sealed = np.arange(2 * PAGE) < PAGE  # the first half lies in a page, its place in the ring free
    mask = mx.array(np.where(sealed, HIDDEN, np.float32(0))[None, None, None])
    page, nothing = keys[:, :, :PAGE].swapaxes(-1, -2), mx.zeros_like(mask)
    in_tail = attention_weights(queries, None, None, keys, nothing, Softmax(0.125))
    in_page = attention_weights(queries, page, None, keys, mask, Softmax(0.125))
    of_page, of_ring = mx.split(in_page, [PAGE], axis=-1)
    moved = mx.concatenate([of_page, of_ring[..., PAGE:]], axis=-1)
    assert mx.allclose(moved, in_tail, rtol=1e-6, atol=1e-6).item()
    assert mx.abs(of_ring[..., :PAGE]).max().item() == 0


def test_blocks_hold_what_is_alike_and_nothing_is_left_out() -> None:
    pages = np.array([3, 0, 100, 4, 0, 3], np.int32)
    blocks = [block.tolist() for block in gathered.gather_blocks(pages, most=12)]
    assert blocks == [[1, 4], [0, 3, 5], [2]]
    assert [b.tolist() for b in gathered.gather_blocks(pages[:1], most=0)] == [[0]]
