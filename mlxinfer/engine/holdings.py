"""What sequences hold of the KV cache: pages, tails, leases on the prefix tree. Pure Python.

Whole pages go to the tree as they are written, so that another request can share them while they
are in use; when a sequence ends or is preempted, the rest of it follows. Only a cut page is copied.
"""

from collections.abc import Sequence as Seq

from ..cache.pages import OutOfPages, PageAllocator
from ..cache.prefix import PrefixTree
from ..cache.prefix_match import Match
from ..cache.reach import Reach
from .batch import Move, Restore
from .sequence import Sequence


class Holdings:
    """Takes and gives back pages for sequences.

    Args:
        reaches: what each layer group keeps.
        allocators: the pages of each group.
        page_size: tokens a page.
        prefill_chunk: tokens of a step's prefill: windows hold that much more for a moment.
        reuse: whether prompts may use what earlier requests left.
    """

    def __init__(
        self,
        *,
        reaches: Seq[Reach],
        allocators: Seq[PageAllocator],
        page_size: int,
        prefill_chunk: int,
        reuse: bool,
    ) -> None:
        self.reaches = reaches
        self.allocators = allocators
        self.page_size = page_size
        self.reuse = reuse
        self._prefill_chunk = prefill_chunk
        self._windowed = [(g, r) for g, r in enumerate(reaches) if r.window is not None]
        self._written: list[Sequence] = []
        self._closing: list[Move] = []
        self.tree = PrefixTree(
            allocators,
            windows=[reach.window for reach in reaches],
            num_kept=[reach.kept_pages(page_size) for reach in reaches],
            page_size=page_size,
        )

    def pages_needed(self, group: int, num_tokens: int) -> int:
        """Pages of a group that a sequence of `num_tokens` needs at once, at most."""
        return self.reaches[group].max_pages(num_tokens, self._prefill_chunk, self.page_size)

    # -- beginning ------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, *, spare: int) -> Restore | None:
        """Take what the tree has of a sequence and the pages for the rest of its known tokens.

        Args:
            spare: pages of each group to leave free.

        Returns:
            The copy of a cut page that is to be made before its first step, if there is one.

        Raises:
            OutOfPages: there is no room now; then nothing is taken.
        """
        match = self._lock(sequence, spare)
        sequence.tables = match.tables()
        sequence.num_computed = match.num_tokens
        sequence.num_sealed = match.num_tokens - match.cut_tokens
        sequence.num_cached = max(sequence.num_cached, min(match.num_tokens, sequence.num_prompt))
        for group, reach in enumerate(self.reaches):
            if reach.window is None:  # in one go, so that a prompt lies in one run
                self.extend(sequence, group, sequence.num_known)
            elif match.cut_tokens:
                self.extend(sequence, group, match.num_tokens)
        return self._restore(match, sequence) if match.cut_tokens else None

    def _lock(self, sequence: Sequence, spare: int) -> Match:
        """Lock the longest match that leaves room for the rest of a sequence.

        A cut page takes a page more, its copy: where only that is too much, it is computed again.
        """
        limit = 0 if sequence.request.prompt_logits or not self.reuse else None
        match = self.tree.match(None, sequence.token_ids, limit=limit)
        while True:
            lease = self.tree.lock(match)
            if self._room(match, sequence, spare):
                sequence.lease = lease
                return match
            self.tree.unlock(lease)
            if not match.cut_tokens:
                raise OutOfPages
            whole = match.num_tokens - match.cut_tokens
            match = self.tree.match(None, sequence.token_ids, limit=whole)

    def _room(self, match: Match, sequence: Sequence, spare: int) -> bool:
        for group, shared in enumerate(match.tables()):
            needed = self.pages_needed(group, sequence.num_known + 1) - len(shared.all_pages)
            free = self.allocators[group].num_free + self.tree.num_evictable(group)
            if needed + spare > free:
                return False
        return True

    def _restore(self, match: Match, sequence: Sequence) -> Restore:
        return Restore(
            sequence=sequence,
            start=sequence.num_sealed,
            stop=match.num_tokens,
            pages=match.cut_pages,
        )

    def shares_later(self, sequence: Sequence, others: Seq[Sequence]) -> bool:
        """Whether a prompt in work will soon have left more to share than there is now."""
        if not self.reuse:
            return False
        ids = sequence.token_ids
        have = None
        for other in others:
            stop = min(other.num_known, len(ids) - 1)
            if stop <= self.page_size or ids[: self.page_size] != other.token_ids[: self.page_size]:
                continue
            have = self.tree.match(None, ids).num_tokens if have is None else have
            common = _common_prefix(ids, other.token_ids, stop)
            if common - common % self.page_size > max(have, other.num_computed):
                return True
        return False

    # -- going on -------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, group: int, num_tokens: int) -> None:
        """Take the pages of a group that `num_tokens` positions need, evicting what is unused.

        Raises:
            OutOfPages: all that is left is in use.
        """
        table, allocator = sequence.tables[group], self.allocators[group]
        missing = -(-(num_tokens - table.end) // self.page_size)
        if missing <= 0:
            return
        if missing > allocator.num_free:
            self.tree.evict(group, missing - allocator.num_free)
        held = table.pages or table.kept
        table.append(allocator.allocate(missing, after=held[-1] if held else None))

    def wrote(self, sequence: Sequence) -> None:
        """A step that is being launched writes whole pages of this sequence."""
        self._written.append(sequence)

    def settle(self, running: Seq[Sequence]) -> None:
        """Between two launches: publish what the last one writes, let go of what windows passed."""
        for sequence in self._written if self.reuse else ():
            if sequence.lease is not None:
                self._hand_over(sequence, sequence.num_sealed)
        self._written = []
        if self._windowed:
            for sequence in running:
                self.trim(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Let go of pages that no later token can see."""
        for group, reach in self._windowed:
            table = sequence.tables[group]
            first = reach.first_page(sequence.num_computed, self.page_size)
            if first <= table.first:
                continue
            lease = sequence.lease_of
            own = max(lease.num_pages - table.first, 0)  # of those dropped, from here on
            self.allocators[group].release(table.drop_before(first)[own:])
            self.tree.trim(lease, group, table.first)

    # -- ending ---------------------------------------------------------------------------------

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Give back all that a sequence holds; with `keep` the tree takes what was computed."""
        lease, kept_partial = sequence.lease_of, False
        if keep and self.reuse:
            written = sequence.num_sealed
            if sequence.started:
                written = min(sequence.num_computed, sequence.num_known)
            if written > sequence.num_sealed:
                tables = [table.copy() for table in sequence.tables]
                self._closing.append(Move(tables, sequence.slot, sequence.num_sealed, written))
            self._hand_over(sequence, written)
            kept_partial = self.tree.add_partial(
                lease, sequence.token_ids, sequence.tables, num_tokens=written
            )
        own = lease.num_pages + kept_partial
        for table, allocator in zip(sequence.tables, self.allocators, strict=True):
            allocator.release(table.pages_from(own))
        self.tree.unlock(lease)
        sequence.tables = []
        sequence.num_slots = 0
        sequence.lease = None

    def take_closing(self) -> list[Move]:
        """Tails of sequences that have ended, to be moved into pages before the next step."""
        closing, self._closing = self._closing, []
        return closing

    def forget(self) -> None:
        """What was computed is not to be trusted: nothing of it is found any more."""
        self._closing, self._written = [], []
        self.tree.clear()

    def _hand_over(self, sequence: Sequence, num_tokens: int) -> None:
        duplicates = self.tree.extend(
            sequence.lease_of, sequence.token_ids, sequence.tables, num_tokens=num_tokens
        )
        for duplicate in duplicates:
            sequence.tables[duplicate.group].replace(duplicate.page_number, duplicate.tree)
            self.allocators[duplicate.group].release([duplicate.own])


def _common_prefix(a: list[int], b: list[int], stop: int) -> int:
    """How many of the first `stop` tokens are equal; halves, so that slices do the comparing."""
    low, high = 0, stop
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
