"""How the pools of a layer group grow: to how many pages, and which layers by when. No arrays.

A pool that grows is copied. Were all layers to grow in the step that needs the page, whoever has a
token in that step would wait until the whole cache is copied. So growth begins ahead of need: once
few pages are left each step copies one layer, or as many as the pages taken meanwhile ask for: few
at first, as most steps take no page, and all of them at the last page.
"""

from collections.abc import Sequence

FIRST_PAGES = 128  # a pool starts small: a short chat takes little memory
GROWTH = 4  # and grows by one part in so many: copying stays rare, and little is taken unused
LEAD = 8  # growth begins when one part in so many is left, or
MIN_LEAD = 32  # ... so many pages


def growth_threshold(pages: int, limit: int) -> int:
    """How many of the first pages may be handed out before a pool of `pages` begins to grow.

    Args:
        pages: that the pool has.
        limit: that it may ever have.
    """
    return pages if pages >= limit else max(pages - max(pages // LEAD, MIN_LEAD), 0)


def wanted_pages(pages: int, extent: int, limit: int) -> int:
    """The size that a pool of `pages` is to have, `pages` itself where it need not grow.

    Args:
        extent: one more than the highest page handed out.
    """
    while extent > growth_threshold(pages, limit):
        if pages >= limit:
            return limit
        pages = min(pages + max(pages // GROWTH, FIRST_PAGES), limit)
    return pages


def layers_to_grow(sizes: Sequence[int], extent: int, limit: int) -> tuple[range, int]:
    """Which layers of a group are to grow before the next step, and to how many pages.

    All are large enough for `extent` afterwards.

    Args:
        sizes: pages of each layer; those that have grown already come first.
    """
    pages = sizes[-1]
    wanted = wanted_pages(pages, extent, limit)
    if wanted == pages:
        return range(0), pages
    num_grown = sum([size >= wanted for size in sizes])
    threshold = growth_threshold(pages, limit)
    taken, lead = extent - threshold, pages - threshold
    asked = -(-len(sizes) * taken * taken // (lead * lead))
    return range(num_grown, min(max(asked, num_grown + 1), len(sizes))), wanted
