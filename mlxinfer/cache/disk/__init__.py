"""The disk tier of the prefix cache."""

from .entry import Entry, Files, chain_keys, entry_keys, namespace_key, page_key
from .tier import NOTHING_STORED, DiskTier

__all__ = [
    "NOTHING_STORED",
    "DiskTier",
    "Entry",
    "Files",
    "chain_keys",
    "entry_keys",
    "namespace_key",
    "page_key",
]
