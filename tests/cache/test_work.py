"""Where tail tokens go: each to the slot that its page table names, none to a recycled page."""

from dataclasses import replace

import numpy as np
from cache.cache_layers import Tokens
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.inputs import Move, ints, seal_index
from mlxinfer.cache.paged import TailPlace
from mlxinfer.cache.pages import PageTable
from mlxinfer.engine.batch import step_metadata

PAGE = 4


@given(st.data())
def test_every_token_goes_where_its_table_says(data: st.DataObject) -> None:
    free = data.draw(st.permutations(range(60)))
    moves, expected = [], []
    for slot in range(data.draw(st.integers(0, 4))):
        num_pages = data.draw(st.integers(3, 12))
        pages, free = free[:num_pages], free[num_pages:]
        kept = data.draw(st.integers(0, 2))
        table = PageTable(PAGE, num_kept=kept, kept=pages[:kept], pages=pages[kept:])
        table.drop_before(data.draw(st.integers(0, num_pages - 1)))
        start = data.draw(st.integers(0, num_pages * PAGE - 1))
        stop = data.draw(st.integers(start + 1, min(start + 2 * PAGE, num_pages * PAGE)))
        moves.append(Move([PageTable(PAGE), table], slot, start, stop))
        for position in range(start, stop):
            page = table.page_at(position // PAGE)
            assert (page is None) == (kept <= position // PAGE < table.first)
            if page is not None:
                assert page == pages[position // PAGE]
                place = page * PAGE + position % PAGE
                before = table.page_at(position // PAGE - 1) if position >= PAGE else None
                earlier = (-1 if before is None else before) * PAGE + position % PAGE
                expected.append((slot, position % (2 * PAGE), place, earlier))
    sealed = seal_index(moves, 1, PAGE)
    assert (sealed is None) == (not expected)
    if sealed is not None:
        assert list(zip(*(part.tolist() for part in sealed), strict=True)) == expected


def test_kernels_write_by_the_positions_that_keys_are_turned_by() -> None:
    """With M-RoPE a token has three: no kernel writes, and mixers turn keys themselves."""
    metadata = step_metadata([], [Tokens(0, 5, 3, 0, 0)])
    place = TailPlace.of(metadata, 16, by_position=True)
    assert place.positions.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert place.offsets.tolist() == [5, 6, 7]
    moved = TailPlace.of(
        replace(metadata, moved_rope_positions=ints([1, 2, 2])), 16, by_position=True
    )
    assert moved.positions.tolist()[:3] == [1, 2, 2]
    assert moved.offsets.tolist() == [5, 6, 7]
    three = np.arange(9, dtype=np.int32).reshape(3, 3)
    turned = replace(metadata, moved_rope_positions=three)
    assert TailPlace.of(turned, 16, by_position=True).positions is None
    assert turned.rope_positions.shape == (3, 3)
