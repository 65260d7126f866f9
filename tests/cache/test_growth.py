"""Arrays of pages grow seldom, by little that is not used, and never beyond the limit."""

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.budget import DOUBLED, FIRST_PAGES, grown
from mlxinfer.metal_kernels.stored import FORMATS


@given(limit=st.integers(1, 20_000), extents=st.lists(st.integers(1, 20_000), max_size=20))
def test_arrays_have_what_is_handed_out(limit: int, extents: list[int]) -> None:
    pages = min(FIRST_PAGES, limit)
    for extent in extents:
        extent = min(extent, limit)
        before, pages = pages, grown(pages, extent, limit)
        assert extent <= pages <= limit
        assert pages == before or before < extent
        assert pages in (before, limit) or pages < DOUBLED or pages % DOUBLED == 0
        assert pages <= max(before, extent + max(extent // 4, DOUBLED, extent))


def test_a_prompt_of_any_length_is_few_copies() -> None:
    pages, copies = FIRST_PAGES, 0
    while pages < 10_000:
        pages, copies = grown(pages, pages + 1, 10_000), copies + 1
    assert copies <= 24


def test_arrays_that_grew_are_whole_pages_of_memory() -> None:
    """MLX writes an array of others in place only if its buffer is not much larger than it is."""
    of_heads = [(heads, dim) for heads in (2, 4, 8, 10) for dim in (64, 80, 96, 128, 192, 256)]
    for heads, dim in of_heads:
        for fmt in FORMATS.values():
            for width, kind in fmt.parts(dim, mx.bfloat16):
                num_bytes = DOUBLED * 16 * heads * width * kind.size
                assert num_bytes % 16_384 == 0, (heads, dim, fmt)
