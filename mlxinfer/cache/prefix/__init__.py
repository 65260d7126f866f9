"""The prefix cache: pages by name. Pure Python."""

from .cache import LOCAL_ROOT, Lease, PrefixCache, RestorePoint, Users
from .index import EvictionQueue, Name, Page, PageNames, common_length

__all__ = [
    "LOCAL_ROOT",
    "EvictionQueue",
    "Lease",
    "Name",
    "Page",
    "PageNames",
    "PrefixCache",
    "RestorePoint",
    "Users",
    "common_length",
]
