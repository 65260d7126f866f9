"""How much of a prompt a prefix tree has, where all layer groups can resume. Changes nothing.

Pages are the tree; everything else is coverage on it. A window covers the positions whose pages it
still holds, a snapshot the one position that it was taken at. Each kind of coverage lowers a
position to the last one before it where the group can resume; `resume_point` asks them in turn
until all agree.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ..page_table import PageTable
from .node import Node, Snapshot

Coverage = Callable[[int], int]  # position -> the last one up to it where a group can resume


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What a prompt can reuse. Lock it before anything else changes the tree."""

    namespace: Hashable
    num_tokens: int  # positions that need not be computed
    num_matched: int  # positions that agree with the tree, whether groups can resume there or not
    nodes: list[Node]  # the whole pages before `num_tokens`, in order
    path: list[Node]  # the whole pages before `num_matched`
    cut: Node | None  # the page that num_tokens lies inside of
    cut_tokens: int  # how many of its tokens: num_tokens % page_size
    snapshot: Snapshot | None  # of the state after `num_tokens`, where there are state layers
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


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What the layer groups of a tree keep.

    Args:
        windows: of each page group; None: it sees everything.
        num_kept: pages of each group at the front that hold sinks.
        page_size: tokens a page.
        has_states: whether there are state layers, which resume at snapshots only.
    """

    windows: Sequence[int | None]
    num_kept: Sequence[int]
    page_size: int
    has_states: bool

    def coverages(self, path: Sequence[Node]) -> list[Coverage]:
        """Where the groups can resume on a path; groups that keep all pages resume anywhere."""
        windows = [
            window_coverage(path, group, window, kept, self.page_size)
            for group, (window, kept) in enumerate(zip(self.windows, self.num_kept, strict=True))
            if window is not None
        ]
        return [*windows, state_coverage(path)] if self.has_states else windows


def find(
    root: Node | None,
    namespace: Hashable,
    token_ids: Sequence[int],
    shape: TreeShape,
    *,
    boundary: int,
    alignment: int,
) -> RestorePoint:
    """Whole pages, then the child that agrees for longest, then back to where all can resume.

    Args:
        root: of the namespace; None: it has nothing.
        namespace: of the prompt.
        token_ids: of the prompt.
        shape: of the tree.
        boundary: tokens that may be reused at most.
        alignment: of the position to resume at.
    """
    size = shape.page_size
    path, overlap = _walk(root, token_ids, boundary, size)
    whole = len(path) - (overlap > 0)
    longest = whole * size + overlap
    point = resume_point(longest, shape.coverages(path), alignment)
    number, inside = divmod(point, size)
    last = path[number] if inside else path[number - 1] if number else None
    return RestorePoint(
        namespace=namespace,
        num_tokens=point,
        num_matched=longest,
        nodes=path[:number],
        path=path[:whole],
        cut=path[number] if inside else None,
        cut_tokens=inside,
        snapshot=last.snapshots[inside or size] if shape.has_states and last else None,
        first=[
            max(first_page(point, window, size), kept)
            for window, kept in zip(shape.windows, shape.num_kept, strict=True)
        ],
        num_kept=list(shape.num_kept),
        page_size=size,
    )


def _walk(
    root: Node | None, token_ids: Sequence[int], boundary: int, page_size: int
) -> tuple[list[Node], int]:
    """The pages that agree with the prompt; and of the last, if it is cut, how many tokens."""
    path: list[Node] = []
    node, overlap = root, 0
    while node is not None:
        start = len(path) * page_size
        tokens = tuple(token_ids[start : min(start + page_size, boundary)])
        child = node.children.get(tokens) if len(tokens) == page_size else None
        if child is None:
            child, overlap = node.closest(tokens)
            path += [child] if child else []
            break
        path.append(child)
        node = child
    return path, overlap


def first_page(point: int, window: int | None, page_size: int) -> int:
    """Number of the first page that the token at `point` sees, its sinks apart."""
    return 0 if window is None else max(point - window + 1, 0) // page_size


def resume_point(longest: int, coverages: Sequence[Coverage], alignment: int = 1) -> int:
    """The last position up to `longest` that all groups accept, a multiple of `alignment`."""
    point, checked = longest - longest % alignment, -1
    while point != checked:
        checked = point
        for lower in coverages:
            point = lower(point)
            point -= point % alignment
    return point


def window_coverage(
    path: Sequence[Node], group: int, window: int, num_kept: int, page_size: int
) -> Coverage:
    """Where a window has all that it sees. Linear in the path.

    The token at position p of a group with window W sees p - W + 1 to p and the sinks, so resuming
    at p takes the pages of p - W + 1 to p - 1 and those kept for sinks; inside of a page always
    that page, so that no page has gaps.
    """
    sinks = len(path) * page_size
    for number, node in enumerate(path[:num_kept]):
        if node.pages[group] is None:
            sinks = min(sinks, number * page_size)
    starts = _run_starts(path, group)

    def lower(point: int) -> int:
        point = min(point, sinks)
        while point > 0:
            last = (point - 1) // page_size
            if starts[last] * page_size <= max(point - window + 1, 0):
                return point
            point = last * page_size  # earlier in this page would take an even longer run
        return 0

    return lower


def state_coverage(path: Sequence[Node]) -> Coverage:
    """Where a snapshot stands, or the beginning."""
    positions, start = [0], 0
    for node in path:
        positions += sorted(start + offset for offset in node.snapshots)
        start += len(node.tokens)

    def lower(point: int) -> int:
        return positions[bisect_right(positions, point) - 1]

    return lower


def _run_starts(path: Sequence[Node], group: int) -> list[int]:
    """For each page the first of the unbroken pages that it ends; one past it where it is None."""
    starts = []
    start = 0
    for number, node in enumerate(path):
        if node.pages[group] is None:
            start = number + 1
        starts.append(start)
    return starts


def _held(node: Node, group: int) -> int:
    page = node.pages[group]
    assert page is not None, "a restore point has every page that it needs"
    return page
