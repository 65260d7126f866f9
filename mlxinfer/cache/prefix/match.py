"""How much of a prompt a prefix tree has, where all layer groups can resume. Changes nothing."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..page_table import PageTable
from .node import Node


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can reuse. Lock it before anything else changes the tree."""

    namespace: Hashable
    num_tokens: int  # positions that need not be computed
    nodes: list[Node]  # the whole pages before it, in order
    cut: Node | None  # the page that num_tokens lies inside of
    cut_tokens: int  # how many of its tokens: num_tokens % page_size
    first: list[int]  # by group: number of the first page after the kept ones needed to go on
    num_kept: list[int]  # by group: pages at the front that are needed besides
    page_size: int

    @property
    def cut_pages(self) -> list[int | None]:
        """By group: the page id to copy the first `cut_tokens` tokens from; [] without a cut."""
        return list(self.cut.pages) if self.cut else []

    def tables(self) -> list[PageTable]:
        """By group: a page table of the whole pages that are needed to go on."""
        return [
            PageTable(
                self.page_size,
                num_kept=num_kept,
                first=first,
                kept=[_held(node, group) for node in self.nodes[:num_kept]],
                pages=[_held(node, group) for node in self.nodes[first:]],
            )
            for group, (first, num_kept) in enumerate(zip(self.first, self.num_kept, strict=True))
        ]


def find(
    root: Node | None,
    namespace: Hashable,
    token_ids: Sequence[int],
    *,
    limit: int,
    windows: Sequence[int | None],
    num_kept: Sequence[int],
    page_size: int,
) -> Match:
    """Whole pages, then the child that agrees for longest, then back to where all can resume."""
    path: list[Node] = []
    node, overlap = root, 0
    while node is not None:
        start = len(path) * page_size
        tokens = tuple(token_ids[start : min(start + page_size, limit)])
        child = node.children.get(tokens) if len(tokens) == page_size else None
        if child is None:
            child, overlap = node.closest(tokens)
            path += [child] if child else []
            break
        path.append(child)
        node = child
    whole = len(path) - (overlap > 0)
    longest = whole * page_size + overlap
    point = resume_point(path, longest, windows, num_kept, page_size)
    number, inside = divmod(point, page_size)
    return Match(
        namespace=namespace,
        num_tokens=point,
        nodes=path[:number],
        cut=path[number] if inside else None,
        cut_tokens=inside,
        first=[
            max(first_page(point, window, page_size), kept)
            for window, kept in zip(windows, num_kept, strict=True)
        ],
        num_kept=list(num_kept),
        page_size=page_size,
    )


def first_page(point: int, window: int | None, page_size: int) -> int:
    """Number of the first page that the token at `point` sees, its sinks apart."""
    return 0 if window is None else max(point - window + 1, 0) // page_size


def resume_point(
    path: Sequence[Node],
    longest: int,
    windows: Sequence[int | None],
    num_kept: Sequence[int],
    page_size: int,
) -> int:
    """The last point up to `longest` where every window has all it sees. Linear in the path.

    The token at position p of a group with window W sees p - W + 1 to p and the sinks, so resuming
    at p takes the pages of p - W + 1 to p - 1 and those kept for sinks; inside of a page always
    that page, so that no page has gaps.
    """
    point, limited = longest, []
    for group, window in enumerate(windows):
        if window is not None:
            for number, node in enumerate(path[: num_kept[group]]):
                if node.pages[group] is None:
                    point = min(point, number * page_size)
            limited.append((window, _run_starts(path, group)))
    checked = -1
    while point != checked:
        checked = point
        for window, starts in limited:
            point = _lower(point, window, starts, page_size)
    return point


def _run_starts(path: Sequence[Node], group: int) -> list[int]:
    """For each page the first of the unbroken pages that it ends; one past it where it is None."""
    starts = []
    start = 0
    for number, node in enumerate(path):
        if node.pages[group] is None:
            start = number + 1
        starts.append(start)
    return starts


def _lower(point: int, window: int, starts: list[int], page_size: int) -> int:
    while point > 0:
        last = (point - 1) // page_size
        if starts[last] * page_size <= max(point - window + 1, 0):
            return point
        point = last * page_size  # earlier in this page would take an even longer run
    return 0


def _held(node: Node, group: int) -> int:
    page = node.pages[group]
    assert page is not None, "a match has every page that it needs"
    return page
