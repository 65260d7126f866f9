"""Arrays of pages grow seldom, by little that is not used, and never beyond the limit."""

from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.kv import DOUBLED, FIRST_PAGES, grown


@given(limit=st.integers(1, 20_000), extents=st.lists(st.integers(1, 20_000), max_size=20))
def test_arrays_have_what_is_handed_out(limit: int, extents: list[int]) -> None:
    pages = min(FIRST_PAGES, limit)
    for extent in extents:
        extent = min(extent, limit)
        before, pages = pages, grown(pages, extent, limit)
        assert extent <= pages <= limit
        assert pages == before or before < extent
        assert pages <= max(before, extent + max(extent // 4, DOUBLED, extent))


def test_a_prompt_of_any_length_is_few_copies() -> None:
    pages, copies = FIRST_PAGES, 0
    while pages < 10_000:
        pages, copies = grown(pages, pages + 1, 10_000), copies + 1
    assert copies <= 24
