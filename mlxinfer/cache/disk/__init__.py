"""The disk tier of the prefix cache."""

from .entry import (
    Entry,
    Files,
    NoFiles,
    chain_keys,
    decode,
    encode,
    entry_bytes,
    group_key,
    namespace_key,
    page_key,
)
from .tier import NOTHING_STORED, DiskTier

__all__ = [
    "NOTHING_STORED",
    "DiskTier",
    "Entry",
    "Files",
    "NoFiles",
    "chain_keys",
    "decode",
    "encode",
    "entry_bytes",
    "group_key",
    "namespace_key",
    "page_key",
]
