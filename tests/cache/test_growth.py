"""How pools grow: no step waits for all layers at once, and no page comes too late."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.budget import FIRST_PAGES, growth_threshold, layers_to_grow, wanted_pages
from mlxinfer.cache.pages import PageAllocator


def grow(sizes: list[int], extent: int, limit: int) -> list[int]:
    """One step; which layers were copied."""
    places, wanted = layers_to_grow(sizes, extent, limit)
    for place in places:
        assert wanted > sizes[place], "copied for nothing"
        sizes[place] = wanted
    return list(places)


@given(
    st.integers(1, 40),
    st.integers(1, 3000),
    st.lists(st.integers(0, 100), min_size=1, max_size=60),
)
def test_every_page_is_there_in_time(num_layers: int, limit: int, taken: list[int]) -> None:
    sizes = [min(FIRST_PAGES, limit)] * num_layers
    for extent in accumulate(taken):
        grow(sizes, min(extent, limit), limit)
        assert min(sizes) >= min(extent, limit)
        assert max(sizes) <= limit
        assert sizes == sorted(sizes, reverse=True), "those that have grown come first"


def test_nothing_grows_before_few_pages_are_left() -> None:
    sizes = [128] * 4
    assert grow(sizes, 96, 10_000) == []
    assert grow(sizes, 97, 10_000) == [0]
    assert sizes == [256, 128, 128, 128]


def test_a_layer_a_step_though_no_page_is_taken() -> None:
    sizes = [1000] * 6
    found = [grow(sizes, 876, 10_000) for _ in range(7)]
    assert found == [[0], [1], [2], [3], [4], [5], []]
    assert sizes == [1250] * 6


@given(st.integers(1, 40), st.integers(1, 100))
def test_a_step_that_takes_few_pages_copies_few_layers(num_layers: int, pages: int) -> None:
    """At most twice the part of the layers that the step takes of the pages left, and one."""
    sizes = [1000] * num_layers
    lead = 1000 - growth_threshold(1000, 10_000)
    extent = 1000 - lead
    while extent + pages <= 1000:
        extent += pages
        assert len(grow(sizes, extent, 10_000)) <= -(-num_layers * pages * 2 // lead)


def test_a_short_prompt_among_decode_steps_copies_two_layers_of_sixteen() -> None:
    """It takes 3 of the last 32 pages, and leaves 8 before them; then 8 tokens are sampled."""
    sizes = [128] * 16
    for extent in (107, 118):
        assert 1 <= len(grow(sizes, extent, 10_000)) <= 2
        assert all(len(grow(sizes, extent, 10_000)) <= 1 for _ in range(8))
    assert sizes == [256] * 16


def test_all_pages_may_be_taken_at_once() -> None:
    sizes = [256, 256, 128]
    assert grow(sizes, 5000, 10_000) == [0, 1, 2]
    assert sizes[0] == wanted_pages(128, 5000, 10_000)
    assert grow(sizes, 5000, 10_000) == [], "room enough for some time"


@pytest.mark.parametrize("limit", [1, 64, 128, 200])
def test_the_limit_is_all_there_is(limit: int) -> None:
    sizes = [min(128, limit)] * 2
    grow(sizes, limit, limit)
    assert sizes == [limit] * 2
    assert grow(sizes, limit, limit) == []


def test_short_prompts_fill_what_is_there_before_more_is_taken() -> None:
    """Kept prompts of three pages: with headroom beside each, 96 pages would hold nine."""
    allocator = PageAllocator(10_000)
    allocator.num_present = growth_threshold(128, 10_000)
    for _ in range(26):
        allocator.allocate(3)
    assert allocator.extent <= allocator.num_present == 96
