"""The prefix cache: pages by name. Pure Python."""

from .cache import LOCAL_ROOT, Lease, PagesByGroup, PrefixCache, RestorePoint
from .index import EvictionQueue, Name, Page, PageNames, common_length

__all__ = [
    "LOCAL_ROOT",
    "EvictionQueue",
    "Lease",
    "Name",
    "Page",
    "PageNames",
    "PagesByGroup",
    "PrefixCache",
    "RestorePoint",
    "common_length",
]
