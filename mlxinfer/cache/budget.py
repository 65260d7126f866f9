"""How many pages, tails and snapshots fit into the memory of a KV cache. Knows no arrays."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InsufficientMemoryError
from ..memory import human_bytes, total_memory_bytes
from .layout import LayerCache
from .paged import GroupKey, PagedLayer
from .pages import AttentionWindow

MAX_RUNNING_SHARE = 4  # tails and states may take a quarter of the budget
SNAPSHOT_SHARE = 4  # snapshots of states take a quarter of what is left
MAX_BARE_PAGES = 1 << 16  # of models that keep nothing in pages: page numbers only
# Pages of layers that only other ranks have; those ranks say how many they have room for.
MAX_ABSENT_PAGES = 1 << 20
FIRST_PAGES = 16  # arrays start small: a first question takes little memory
# Smaller arrays double. Larger ones have a multiple of DOUBLED pages, so that their bytes fill
# whole pages of the machine's memory (16 KB). Otherwise MLX may reuse a buffer that is much larger
# than the array, and then the next write copies the array instead of writing in place.
DOUBLED = 128
GROWTH = 4  # larger arrays grow by a quarter: copies stay rare, and little memory is unused


class GroupPlan(NamedTuple):
    """A page group to be made."""

    window: AttentionWindow  # which positions a token sees
    layers: list[PagedLayer]  # that this rank has
    num_pages: int  # that there may be
    page_bytes: int  # of a page, all layers together


def running_sequences(
    paged: Sequence[PagedLayer],
    layers: Sequence[LayerCache],
    page_size: int,
    max_batch: int,
    budget_bytes: int,
) -> tuple[int, int]:
    """How many sequences may run, at most `max_batch`, and the bytes that they leave.

    A running sequence has tails of two pages, and a state. While a step makes new ones, the old
    ones are there too.

    Args:
        paged: of `layers`, those that have pages.
    """
    tails_bytes = 2 * page_size * sum(layer.tail_bytes_each for layer in paged)
    state_bytes = sum(layer.state_bytes for layer in layers)
    most = budget_bytes // MAX_RUNNING_SHARE // max(tails_bytes + 2 * state_bytes, 1)
    max_batch = max(1, min(max_batch, most))
    return max_batch, budget_bytes - max_batch * 2 * (tails_bytes + state_bytes)


def plan_groups(
    layers: Sequence[PagedLayer],
    here: Sequence[PagedLayer],
    page_size: int,
    prefill_chunk: int,
    max_batch: int,
    budget_bytes: int,
    num_pages: int | None,
    elsewhere: int,
) -> list[GroupPlan]:
    """The page groups of a model, each with as many pages as the budget allows.

    Where no layer has pages, a group of no layers counts what lies elsewhere, and makes the prefix
    cache.

    Args:
        layers: of the whole model, those that have pages.
        num_pages: of each full group, in place of as many as there is room for.
        elsewhere: bytes of a token in layers that manage their caches themselves.
    """
    members: dict[GroupKey, list[PagedLayer]] = {}
    for layer in layers:
        in_group = members.setdefault(layer.group_key, [])
        in_group += [layer] if layer in here else []
    keyed = sorted(members.items(), key=lambda item: item[0])
    windows = [AttentionWindow(key[0] or None, *key[1:]) for key, _ in keyed]
    groups = [group for _, group in keyed]
    costs = [[layer.token_bytes * page_size for layer in group] for group in groups]
    # The keys or values of one are there twice.
    prices = [sum(cost) + max(cost, default=0) for cost in costs]
    totals = [sum(cost) for cost in costs]
    if not keyed:
        windows, groups = [AttentionWindow()], [[]]
        totals = prices = [elsewhere * page_size]
        num_pages = num_pages or (None if elsewhere else MAX_BARE_PAGES)
    held = [_max_held(window, page_size, prefill_chunk, max_batch) for window in windows]
    counts = page_counts(prices, budget_bytes, max_held=held, num_pages=num_pages)
    return [GroupPlan(*plan) for plan in zip(windows, groups, counts, totals, strict=True)]


def _max_held(
    window: AttentionWindow, page_size: int, prefill_chunk: int, max_batch: int
) -> int | None:
    """Pages of a window that `max_batch` sequences can hold; None: bound by their length."""
    if window.size is None:
        return None
    held = -(-(window.size - 1) // page_size) + 2 + window.kept_pages(page_size)
    return max_batch * held + prefill_chunk // page_size


def page_counts(
    costs: Sequence[int],
    budget_bytes: int,
    *,
    max_held: Sequence[int | None],
    num_pages: int | None,
) -> list[int]:
    """Pages of each group: as many full pages as fit, and enough for all windows.

    A window group never needs more pages than its sequences can hold, nor more than the full groups
    have. Its size makes sure that it never runs out before them.

    Args:
        costs: bytes of a page of each group.
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
    most = max(budget_bytes, 0) // least
    if not all(costs):
        most = min(most, MAX_ABSENT_PAGES)

    def bytes_of(full: int) -> int:
        return sum(c * n for c, n in zip(costs, counts(full), strict=True))

    fitting = bisect_right(range(1, most + 1), budget_bytes, key=bytes_of)
    if fitting < 2:
        needed, left = human_bytes(2 * sum(costs)), human_bytes(max(0, budget_bytes))
        raise InsufficientMemoryError(
            f"Two pages of the KV cache take {needed}, and {left} are left for them beside what "
            "each request takes; raise max_memory or lower max_batch.",
            param="max_memory",
        )
    return counts(fitting)


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


def grown(pages: int, extent: int, limit: int) -> int:
    """The pages that arrays of `pages` are to have, `pages` itself where they need not grow.

    Args:
        extent: one more than the highest page handed out.
    """
    while pages < extent:
        if pages < DOUBLED:
            pages = min(2 * pages, DOUBLED, limit)
        else:
            pages = min((pages + max(pages // GROWTH, DOUBLED)) // DOUBLED * DOUBLED, limit)
    return pages
