"""The prefix cache: a tree of pages by the tokens that they hold. Pure Python."""

from .leases import Lease
from .match import Match
from .node import StoredPage
from .tree import Duplicate, PrefixCounters, PrefixTree

__all__ = ["Duplicate", "Lease", "Match", "PrefixCounters", "PrefixTree", "StoredPage"]
