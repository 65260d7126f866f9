"""The disk tier of the prefix cache."""

from .entry import Entry, Files, chain_keys, namespace_key, page_key
from .tier import DiskStats, DiskTier

__all__ = ["DiskStats", "DiskTier", "Entry", "Files", "chain_keys", "namespace_key", "page_key"]
