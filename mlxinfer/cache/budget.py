"""How many pages a memory budget holds, and how arrays grow towards them. Pure Python; no arrays.

Arrays that grow are copied, one at a time, so that only one is ever there twice.
"""

from collections.abc import Sequence

from ..errors import InsufficientMemoryError
from ..memory import human_bytes, total_memory_bytes

MAX_BARE_PAGES = 1 << 16  # where nothing lies in pages, and they are numbers alone
# Where some groups, or all, have their layers on other ranks, which say what there is room for.
MAX_ABSENT_PAGES = 1 << 20


def page_counts(
    costs: Sequence[int],
    budget_bytes: int,
    *,
    max_held: Sequence[int | None],
    num_pages: int | None,
) -> list[int]:
    """Pages of each group: as many full pages as fit, and windows enough for all that can run.

    A window group never needs more pages than sequences can hold of it, nor more than the full
    groups have: it is sized so that it is never what runs out.

    Args:
        costs: bytes of a page of each group.
        budget_bytes: for all pages.
        max_held: pages that all sequences together can hold of each group; None: bound by their
            length alone.
        num_pages: of every full group, instead of as many as the budget holds.

    Raises:
        InsufficientMemoryError: it does not hold two pages.
    """

    def counts(full: int) -> list[int]:
        return [full if held is None else min(full, held) for held in max_held]

    if num_pages is not None:
        return counts(num_pages)
    least = min(filter(None, costs), default=0)
    if not least:  # layers that would have pages are all on other ranks
        return counts(MAX_ABSENT_PAGES)
    low, high = 0, budget_bytes // least if budget_bytes > 0 else 0
    if not all(costs):
        high = min(high, MAX_ABSENT_PAGES)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(c * n for c, n in zip(costs, counts(middle), strict=True)) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    if low < 2:
        raise InsufficientMemoryError(
            f"Two pages of the KV cache take {human_bytes(2 * sum(costs))}, and "
            f"{human_bytes(max(0, budget_bytes))} are left for them beside what each request "
            "takes; raise max_memory or lower max_batch.",
            param="max_memory",
        )
    return counts(low)


def check_memory(num_bytes: int) -> None:
    """Check that pages of a stated number fit: they are allocated at once.

    Raises:
        InsufficientMemoryError: this machine has less than `num_bytes`.
    """
    total = total_memory_bytes()
    if num_bytes > total:
        raise InsufficientMemoryError(
            f"num_pages asks for {human_bytes(num_bytes)} of KV cache, and this machine has "
            f"{human_bytes(total)}; ask for fewer.",
            param="num_pages",
        )


FIRST_PAGES = 16  # arrays start small: a first question takes little memory
DOUBLED = 128  # pages: arrays of fewer double, and larger ones grow by so many at least,
GROWTH = 4  # ... or by one part in so many: copying stays rare, and little is taken unused


def grown(pages: int, extent: int, limit: int) -> int:
    """The pages that arrays of `pages` are to have, `pages` itself where they need not grow.

    Args:
        extent: one more than the highest page handed out.
        limit: that there may ever be.
    """
    while pages < extent:
        pages = min(pages + max(pages // GROWTH, min(pages, DOUBLED)), limit)
    return pages
