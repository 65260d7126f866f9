"""The disk tier of the prefix cache."""

from ..prefix.index import group_key, namespace_key, page_key
from .entry import Entry, Files, decode, encode, entry_bytes
from .tier import NOTHING_STORED, DiskTier

__all__ = [
    "NOTHING_STORED",
    "DiskTier",
    "Entry",
    "Files",
    "decode",
    "encode",
    "entry_bytes",
    "group_key",
    "namespace_key",
    "page_key",
]
