"""Names of pages: a hash of the name before it and the page's key ids. Pure; knows no store.

A name stands for the whole prefix that ends with the page, wherever the page lies: in memory, on
the disk, at a peer or in a saved session. The name before the first page, the root, stands for
everything else that keys and values depend on.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

Name = bytes
"""BLAKE2b-152 and a byte 0; in the key of a layer group's entry the group stands in its place."""
KEY_BYTES = 20
VERSION = 3  # of names and entries; folders of other versions are emptied
ID_BYTES = 8
_PAGE = blake2b(digest_size=KEY_BYTES - 1, person=b"page")


class PageNames:
    """The names of a prompt's pages. Each is hashed once, up to the last one asked for.

    Args:
        root: the name before the first page.
        token_ids: key ids from position 0; more may be appended.
        page_size: tokens.
    """

    __slots__ = ("_names", "page_size", "root", "token_ids")

    def __init__(self, root: Name, token_ids: Sequence[int], page_size: int) -> None:
        self.root, self.token_ids, self.page_size = root, token_ids, page_size
        self._names = [root]  # [n]: of the page before page n

    def name(self, number: int) -> Name:
        """The name of whole page `number`; -1: the root."""
        if number + 1 >= len(self._names):
            self._hash(number + 1)
        return self._names[number + 1]

    def between(self, start: int, stop: int) -> list[Name]:
        """The names of whole pages from `start` up to `stop`; quicker than one by one."""
        self._hash(stop)
        return self._names[start + 1 : stop + 1]

    def _hash(self, count: int) -> None:
        """Name the first `count` pages; their ids are packed at once."""
        names, size = self._names, self.page_size
        packed = pack_ids(self.token_ids[(len(names) - 1) * size : count * size])
        for start in range(0, len(packed), size * ID_BYTES):
            names.append(packed_key(names[-1], packed[start : start + size * ID_BYTES]))

    def tokens(self, number: int, count: int | None = None) -> tuple[int, ...]:
        """The first `count` key ids of a page; None: all that there are."""
        size, start = self.page_size, number * self.page_size
        return tuple(self.token_ids[start : start + (size if count is None else count)])


def namespace_key(*parts: str) -> bytes:
    """The key of a namespace: a model's content id, a KV format, an adapter, in a fixed order."""
    texts = [part.encode() for part in parts]
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return _hash(data, f"namespace{VERSION}", KEY_BYTES)


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a page: of its tokens and all that came before."""
    return packed_key(parent, pack_ids(token_ids))


def packed_key(parent: bytes, packed_ids: bytes) -> bytes:
    """`page_key` of ids that are packed."""
    hashed = _PAGE.copy()  # quicker than a new one with its parameters
    hashed.update(parent + packed_ids)
    return hashed.digest() + b"\0"


def group_key(page: bytes, group: int) -> bytes:
    """The key of a layer group's entry of the page with this key. Groups are below 256."""
    return page[:-1] + bytes([group])


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Ids as bytes, `ID_BYTES` each."""
    return struct.pack(f"<{len(token_ids)}Q", *token_ids)


def _hash(data: bytes, purpose: str, num_bytes: int) -> bytes:
    return blake2b(data, digest_size=num_bytes, person=purpose.encode()).digest()
