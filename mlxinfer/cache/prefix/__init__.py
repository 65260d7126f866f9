"""The prefix cache: a tree of pages by the tokens that they hold. Pure Python."""

from .leases import Lease
from .match import RestorePoint
from .node import Snapshot, StoredPage
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
