"""The prefix cache: pages by name. Pure Python."""

from .cache import LOCAL_ROOT, Lease, PrefixCache, RestorePoint, Users
from .names import Name, PageNames
from .page import EvictionQueue, Page

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
]
