"""The prefix cache: a tree of pages by the tokens that they hold. Pure Python."""

from .node import Node, RestorePoint, Rule, Snapshot, Spans, resume_point, span_rule
from .store import Lease
from .tree import PrefixTree

__all__ = [
    "Lease",
    "Node",
    "PrefixTree",
    "RestorePoint",
    "Rule",
    "Snapshot",
    "Spans",
    "resume_point",
    "span_rule",
]
