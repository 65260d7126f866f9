"""What holds of a prefix tree at any time."""

from collections.abc import Sequence

from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.cache.prefix import Node, PrefixTree


def groups_of(
    allocators: Sequence[PageAllocator],
    windows: Sequence[int | None],
    page_size: int,
    num_kept: Sequence[int] | None = None,
) -> list[PageGroup]:
    """Groups of these windows; `num_kept` pages of each hold sinks."""
    kept = num_kept or [0] * len(windows)
    return [
        PageGroup(AttentionWindow(window, sinks * page_size), allocator, page_size, page_size, 1)
        for allocator, window, sinks in zip(allocators, windows, kept, strict=True)
    ]


def check(tree: PrefixTree) -> None:
    """Assert all invariants. Costs the size of the tree."""
    nodes = list(tree.nodes())
    assert tree.num_nodes == len(nodes)
    assert tree.num_unlocked == sum(not node.locks for node in nodes)
    assert tree.leaves.items() == {node for node in nodes if node.evictable}
    for group, loose in tree.loose.items():
        free = {n for n in nodes if n.pages[group] is not None and not n.holds[group]}
        assert loose.items() == free
    for group in range(len(tree.groups)):
        pages = [page for node in nodes if (page := node.pages[group]) is not None]
        assert len(pages) == len(set(pages)) <= tree._num_pages[group]
    snapshots = [snapshot for node in nodes for snapshot in node.snapshots.values()]
    assert tree.snapshots.items() == {s for s in snapshots if not s.holds}
    assert tree.states is not None or not snapshots
    for node in [*tree.roots.values(), *nodes]:
        _check_node(tree, node)


def _check_node(tree: PrefixTree, node: Node) -> None:
    assert node.alive
    assert node.order == sorted(node.children)
    assert node.locks or not any(child.locks for child in node.children.values())
    if node.parent is None:
        assert node.children or node.locks, "a namespace of nothing"
        return
    assert node.parent.children[node.tokens] is node
    assert 0 < len(node.tokens) <= tree.page_size
    assert len(node.tokens) == tree.page_size or not node.children
    for offset, snapshot in node.snapshots.items():
        assert snapshot.node is node
        assert snapshot.offset == offset <= len(node.tokens)
    assert node.locks or node.children or not node.empty, "a node of nothing"
    for group in range(len(tree.groups)):
        assert node.pages[group] is not None or group in tree.windowed
        assert node.holds[group] <= node.locks
