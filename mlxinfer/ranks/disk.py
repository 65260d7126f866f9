"""Prefix pages on the disks of several ranks: each rank stores its part of every page.

Rank 0 decides which pages are stored and looked for, and names them. The others store their part
under the same name, in a namespace of their own. A page counts as found if all ranks have read and
verified their parts. If one rank lacks its part, all compute the page again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from ..cache.disk import DiskTier, Entry, namespace_key
from ..cache.inputs import PageTransfer
from ..engine.followers import FollowerDisks
from . import messages

GRACE_S = 5.0  # that a rank may take to answer, beside the time that it was given to write


class OtherDisks(FollowerDisks):
    """The disks of the other ranks, as rank 0 sees them.

    Args:
        form: what their parts are: "parts of 2 ranks".
    """

    def __init__(self, others: messages.Others, form: str) -> None:
        self.form = form
        self._others = others
        self._number = 0  # of the last order

    def open(self, folder: str, namespace: bytes, max_bytes: int) -> None:
        self._others.tell("open_disk", folder, namespace, max_bytes)

    def begin_fetch(self, places: Sequence[tuple[int, bytes]]) -> None:
        """Let them read (group, key); `end_fetch` must follow."""
        self._number += 1
        self._others.tell("fetch", self._number, list(places))

    def end_fetch(self) -> list[int]:
        """Places that one of them lacks, or found broken, in order; raises RanksFailedError."""
        answer = self._answers(self._others.step_s)
        if answer is None:
            raise self._others.fail(
                TimeoutError(
                    f"a rank has not read its pages within {self._others.step_s:g} seconds"
                )
            )
        return sorted(answer)

    def begin_save(self, spills: Sequence[PageTransfer], timeout_s: float) -> None:
        """Let them store pages and wait for the writes; `end_save` must follow."""
        self._number += 1
        self._others.tell("save", self._number, list(spills), timeout_s)

    def end_save(self, timeout_s: float) -> bool:
        answer = self._answers(timeout_s + GRACE_S)
        return answer is not None and not answer

    def _answers(self, timeout_s: float) -> set[int] | None:
        """The places of the last order that a rank lacks; None: some did not answer in time."""
        deadline_s, missing, left = time.monotonic() + timeout_s, set[int](), self._others.count
        while left:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            answer = self._others.hear(messages.DiskDone, left_s)
            if answer is not None and answer.number == self._number:  # else one that came late
                missing.update(answer.missing)
                left -= 1
        return missing


class OwnDisk:
    """The disk of a rank that follows, by the orders of rank 0.

    Attributes:
        held: payloads by key, which the next step may put into pages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tier: DiskTier | None = None
        self.held: dict[bytes, memoryview] = {}

    def open(self, folder: str, namespace: bytes, max_bytes: int) -> None:
        """Keep pages in a folder of this path, in a namespace of this rank."""
        name = namespace_key(namespace.hex(), f"rank {self._rank}")
        self._tier = DiskTier(folder, name, max_bytes=max_bytes)

    def fetch(self, places: Sequence[tuple[int, bytes]], page_bytes: Sequence[int]) -> list[int]:
        """Read the payloads of (group, key); the places of those that are not there.

        `page_bytes` are the sizes by group. A rank without layers of a group has no bytes of it.
        """
        assert self._tier is not None, "rank 0 opens the disk first"
        missing: list[int] = []
        for place, (group, key) in enumerate(places):
            entry = self._tier.get(key) if page_bytes[group] else None
            if entry is not None and entry.payload.nbytes == page_bytes[group]:
                self.held[key] = entry.payload
            elif page_bytes[group]:
                missing.append(place)
            else:
                self.held[key] = memoryview(b"")
        return missing

    def put(self, spilled: Iterable[Entry]) -> None:
        for entry in spilled:
            if entry.payload and self._tier is not None:
                self._tier.store(entry)

    def flush(self, timeout_s: float) -> bool:
        return self._tier is not None and self._tier.flush(timeout_s)

    def take_held(self) -> Mapping[bytes, memoryview]:
        """Payloads for the step that comes now; those that it does not want are dropped."""
        held, self.held = self.held, {}
        return held

    def close(self, timeout_s: float) -> None:
        self.held = {}
        if self._tier is not None:
            self._tier.close(timeout_s)
            self._tier = None
