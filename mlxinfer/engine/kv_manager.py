"""What sequences hold of the KV cache: pages, tails, leases on the prefix tree. Pure Python.

Whole pages of a prompt go to the tree as they are written, so that another request can share them
while they are in use; those of its answer when it ends or is preempted, or, where a window lets go
of them before, as they are written too. Only a cut page is copied.
"""

from collections.abc import Sequence as Seq

from ..cache.groups import PageGroup
from ..cache.page_table import PageTable
from ..cache.pages import OutOfPages
from ..cache.prefix import PrefixTree
from ..cache.prefix.match import Match
from ..cache.work import CacheWork, Move, PartialCopy, Spill
from .pagestore import PageStore, Transfers
from .sequence import Sequence


class KVManager:
    """Takes and gives back pages for sequences.

    Args:
        groups: what layers keep in pages.
        reuse: whether prompts may use what earlier requests left.
        store: where evicted pages go, and come back from.
    """

    def __init__(
        self, groups: Seq[PageGroup], *, reuse: bool, store: PageStore | None = None
    ) -> None:
        self.groups = groups
        self.allocators = [group.allocator for group in groups]
        self.page_size = groups[0].page_size
        self.reuse = reuse
        self._recycling = [(g, group) for g, group in enumerate(groups) if group.recycles]
        self._written: list[Sequence] = []
        self._closing: list[Move] = []
        self._copies: dict[Sequence, PartialCopy] = {}  # of sequences that no step has yet
        self._transfers = Transfers(store, groups) if store and reuse else None
        self.tree = PrefixTree(
            self.allocators,
            windows=[group.window.size for group in groups],
            num_kept=[group.num_kept for group in groups],
            page_size=self.page_size,
            on_evict=self._transfers.note_evicted if self._transfers else None,
        )

    def pages_needed(self, group: int, num_tokens: int) -> int:
        """Pages of a group that a sequence of `num_tokens` needs at once, at most."""
        return self.groups[group].max_pages(num_tokens)

    # -- beginning ------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, *, slot: int, spare: int) -> None:
        """Take what the tree has of a sequence and the pages for the rest of its known tokens.

        A partial page that it shares is copied before the next step.

        Args:
            sequence: waits.
            slot: that it is to run in.
            spare: pages of each group to leave free.

        Raises:
            OutOfPages: there is no room now; then nothing is taken.
        """
        on_disk = sequence.namespace is None
        if self._transfers is not None and on_disk and not sequence.request.prompt_logits:
            self._transfers.fetch(
                self.tree, sequence.token_ids, lambda match: self._room(match, sequence, spare)
            )
        match = self._lock(sequence, spare)
        sequence.tables = match.tables()
        sequence.num_computed = match.num_tokens
        sequence.num_sealed = match.num_tokens - match.cut_tokens
        if not sequence.num_preempted:  # later it finds what it left itself
            sequence.num_cached = match.num_tokens
        for g, group in enumerate(self.groups):
            num_tokens = group.begin(match.num_tokens, sequence.num_known)
            self._extend(sequence.tables[g], g, num_tokens)
        if match.cut_tokens:
            self._copies[sequence] = PartialCopy(
                sequence.tables, slot, sequence.num_sealed, match.num_tokens, match.cut_pages
            )

    def _lock(self, sequence: Sequence, spare: int) -> Match:
        """Lock the longest match that leaves room for the rest of a sequence.

        A cut page takes a page more, its copy: where only that is too much, it is computed again.
        """
        limit = 0 if sequence.request.prompt_logits or not self.reuse else None
        match = self.tree.match(sequence.namespace, sequence.token_ids, limit=limit)
        while True:
            lease = self.tree.lock(match, priority=sequence.request.priority)
            if self._room(match, sequence, spare):
                sequence.lease = lease
                self.tree.count(match)
                return match
            self.tree.unlock(lease)
            if not match.cut_tokens:
                raise OutOfPages
            whole = match.num_tokens - match.cut_tokens
            match = self.tree.match(sequence.namespace, sequence.token_ids, limit=whole)

    def _room(self, match: Match, sequence: Sequence, spare: int) -> bool:
        for group, shared in enumerate(match.tables()):
            needed = self.pages_needed(group, sequence.num_known + 1) - len(shared.all_pages)
            free = self.allocators[group].num_free + self.tree.num_evictable(group)
            if needed + spare > free:
                return False
        return True

    def shares_later(self, sequence: Sequence, others: Seq[Sequence]) -> bool:
        """Whether a prompt in work will soon have left more to share than there is now."""
        if not self.reuse or sequence.request.prompt_logits:
            return False
        for other in others:
            until = other.sharers.get(sequence)
            if until is None:  # compared once: prompts are long, and many wait
                until = other.sharers[sequence] = self._shared_later(sequence, other)
            if until > other.num_computed:
                return True
        return False

    def _shared_later(self, sequence: Sequence, other: Sequence) -> int:
        """How far another must come to have left all that a prompt can share; 0: it is there."""
        ids, known, size = sequence.token_ids, other.token_ids, self.page_size
        stop = min(len(known), len(ids) - 1)
        if stop <= size or ids[:size] != known[:size] or other.namespace != sequence.namespace:
            return 0
        common = _common_prefix(ids, known, stop)
        common -= common % size
        return common if common > self.tree.match(sequence.namespace, ids).num_tokens else 0

    # -- before a step --------------------------------------------------------------------------

    def take_work(self) -> CacheWork:
        """What is to be done to the cache's arrays before the next step.

        Its copies are as good as made: the pages that they are made from may be evicted.
        """
        for sequence in self._copies:
            self.tree.release_cut(sequence.lease_of)
        spills, loads = self._transfers.take() if self._transfers else ([], [])
        work = CacheWork(self._closing, spills, loads, list(self._copies.values()))
        self._closing, self._copies = [], {}
        return work

    def take_all(self) -> list[Spill]:
        """All that the tree has and the disk lacks, what was used last and parents first."""
        assert self._transfers is not None
        return self._transfers.all_of(self.tree)

    # -- going on -------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the pages that `num_tokens` positions need, evicting what is unused.

        Raises:
            OutOfPages: all that is left of a group is in use; it may have got those of others.
        """
        for group, table in enumerate(sequence.tables):
            self._extend(table, group, num_tokens)

    def extend_each(self, sequences: Seq[Sequence], num_tokens: Seq[int]) -> bool:
        """The same for sequences that lack a page of a group at most, while pages are free.

        Returns:
            False: not enough are; some may have got theirs of a group.
        """
        return all(
            allocator.extend([s.tables[group] for s in sequences], num_tokens)
            for group, allocator in enumerate(self.allocators)
        )

    def _extend(self, table: PageTable, group: int, num_tokens: int) -> None:
        """The same of one group."""
        end = table.end
        if num_tokens <= end:
            return
        missing = -(-(num_tokens - end) // self.page_size)
        allocator = self.allocators[group]
        if missing > allocator.num_free:
            self.tree.evict(group, missing - allocator.num_free)
        table.append(allocator.allocate(missing, after=table.last))

    def wrote(self, sequence: Sequence) -> None:
        """A step that is being launched writes whole pages of a prompt."""
        self._written.append(sequence)

    def wrote_answer(self, sequence: Sequence) -> None:
        """It writes whole pages of an answer.

        Nobody asks for one that still grows: they can wait for its end, but where a window would
        let go of them before.
        """
        if self._recycling:
            self._written.append(sequence)

    @property
    def unsettled(self) -> bool:
        """Whether there is anything to settle."""
        return bool(self._written or self._recycling)

    def settle(self, running: Seq[Sequence]) -> bool:
        """Between two launches: publish what the last one writes, let go of what windows passed.

        Returns:
            Whether a page was replaced by an equal one that was there before.
        """
        replaced = False
        for sequence in self._written if self.reuse else ():
            if sequence.lease is not None:
                replaced |= self._hand_over(sequence, sequence.num_sealed)
        self._written = []
        if self._recycling:
            for sequence in running:
                self.trim(sequence)
        return replaced

    def trim(self, sequence: Sequence) -> None:
        """Let go of pages that no later token can see."""
        for g, group in self._recycling:
            table = sequence.tables[g]
            first = table.first
            dropped = group.commit(table, sequence.num_computed)
            if dropped:
                lease = sequence.lease_of
                own = max(lease.num_pages - first, 0)  # of those dropped, from here on
                group.allocator.release(dropped[own:])
                self.tree.trim(lease, g, table.first)

    # -- ending ---------------------------------------------------------------------------------

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Give back all that a sequence holds; with `keep` the tree takes what was computed."""
        lease, kept_partial = sequence.lease_of, False
        self._copies.pop(sequence, None)
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
        sequence.lease = None
        sequence.sharers = {}

    def forget(self) -> None:
        """What was computed is not to be trusted: nothing of it is found any more."""
        self._closing, self._written, self._copies = [], [], {}
        if self._transfers is not None:
            self._transfers.forget()
        self.tree.clear()

    def _hand_over(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give whole pages to the tree; whether it had one of them, which replaces one's own."""
        duplicates = self.tree.extend(
            sequence.lease_of, sequence.token_ids, sequence.tables, num_tokens=num_tokens
        )
        for duplicate in duplicates:
            sequence.tables[duplicate.group].replace(duplicate.page_number, duplicate.tree)
            self.allocators[duplicate.group].release([duplicate.own])
        return bool(duplicates)


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
