"""The prefix cache: a tree of pages by the tokens that they hold. Pure Python."""

from .node import RestorePoint, Snapshot, StoredPage
from .store import Lease
from .tree import Duplicate, PrefixCounters, PrefixTree

__all__ = [
    "Duplicate",
    "Lease",
    "PrefixCounters",
    "PrefixTree",
    "RestorePoint",
    "Snapshot",
    "StoredPage",
]
