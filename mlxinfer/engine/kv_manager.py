"""The KV cache that each sequence holds: pages, tails, and what it shares. Pure Python.

Whole pages of a prompt get their names as they are written, so that another request can share them
at once. Pages of an answer get theirs when the sequence ends or is preempted, or earlier if a
window is about to recycle them. Only a partial page is copied.
"""

from collections.abc import Sequence as Seq

from ..cache.inputs import CacheWork, Move
from ..cache.pages import PageGroup, StateGroup
from ..cache.prefix import LOCAL_ROOT, PageNames, PrefixCache, RestorePoint, common_length
from ..core import Reuse, ReuseEnd
from ..errors import InvalidRequestError
from .batch import Namespace, Sequence
from .pagestore import PageStore
from .snapshots import Snapshots

ClientSlot = tuple[str | None, int]
"""The owner of a request, and its slot: a number of the client's choice."""
MAX_PLACES = 64  # of an owner, with a prompt that is remembered


class KVManager:
    """Takes and gives back pages for sequences.

    Args:
        states: of recurrent layers; None: there are none.
        store: where evicted pages go, and come back from.
    """

    def __init__(
        self,
        groups: Seq[PageGroup],
        *,
        reuse: bool,
        states: StateGroup | None = None,
        store: PageStore | None = None,
    ) -> None:
        self.groups = groups
        self.allocators = [group.allocator for group in groups]
        self.page_size = groups[0].page_size
        self.reuse = reuse
        self._recycling = [(g, group) for g, group in enumerate(groups) if group.recycles]
        self._written: list[Sequence] = []
        self._closing: list[Move] = []
        self._copies: dict[Sequence, Move] = {}  # of sequences that no step has yet
        self._store = store if reuse else None
        self.prefix = PrefixCache(
            groups,
            on_evict=self._store.note_evicted if self._store else None,
            states=states,
            root=(store and store.root) or LOCAL_ROOT,
        )
        if store is not None:
            store.forget()
            store.on_open = self.prefix.set_root
        self._states: Snapshots | None = None
        if states is not None:
            self._states = Snapshots(states, self.prefix, self.names_of, reuse=reuse)
        self._prompts: dict[ClientSlot, tuple[Namespace | None, list[int]]] = {}  # oldest first

    # -- beginning ------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, *, slot: int, spare: int) -> bool:
        """Take what memory has of a sequence and the pages for the rest of its known tokens.

        A partial page that it shares is copied before the next step.

        Returns:
            False: there is no room now; then nothing is taken.
        """
        tiers: dict[int, str] = {}
        if self._store is not None and not sequence.request.prompt_logits:
            tiers = self._store.fetch(
                self.prefix, self.probe(sequence), lambda point: self._room(point, sequence, spare)
            )
        point = self._lookup(sequence, spare)
        if point is None:
            return False
        sequence.tables = point.tables
        sequence.num_computed = point.num_tokens
        sequence.num_sealed = point.num_tokens - point.cut_tokens
        if not sequence.num_preempted:  # else it finds pages of its own
            sequence.num_cached = point.num_tokens
            sequence.request.reuse = self._reuse(sequence, point, tiers)
        for g, group in enumerate(self.groups):
            # Where none is recycled, all pages at once: so a prompt lies in one run of pages.
            num_tokens = point.num_tokens if group.recycles else len(sequence.token_ids)
            extended = self._extend(sequence, g, num_tokens, everything=True)
            assert extended, "there was room"
        if point.cut is not None:
            pages = tuple(point.cut.ids[: len(self.groups)])
            self._copies[sequence] = Move(
                sequence.tables, slot, sequence.num_sealed, point.num_tokens, pages
            )
        if self._states is not None:
            self._states.begin(sequence, slot, point)
        return True

    def probe(
        self, sequence: Sequence, *, limit: int | None = None, whole_pages: bool = False
    ) -> RestorePoint:
        """The longest prefix of a sequence that memory has, see `PrefixCache.probe`."""
        return self.prefix.probe(
            self.names_of(sequence),
            limit=limit,
            whole_pages=whole_pages,
            spans=() if sequence.pictures is None else sequence.pictures.spans,
        )

    def _reuse(self, sequence: Sequence, point: RestorePoint, tiers: dict[int, str]) -> Reuse:
        """Where the reuse of a prompt ended, with the pages that came from the disk or peers."""
        number = point.num_pages
        places = [(n, g) for g, group in enumerate(self.groups) for n in group.new_pages(number)]
        missing = [(n, g) for n, g in places if not point.holds(n, g)]
        if self._states is not None and not missing and not point.holds(number, len(self.groups)):
            missing = [(number, len(self.groups))]
        at: int | None = None
        end = ReuseEnd.COMPLETE
        if not self.reuse or sequence.request.prompt_logits:
            end = ReuseEnd.DISABLED
        elif (number + 1) * self.page_size < len(point.names.token_ids):
            end = ReuseEnd.LIMITED
            if missing:
                at, group = min(missing)
                end = self._end_at(point, at, group)
        return Reuse(
            num_tokens=point.num_tokens,
            tiers=tuple([tiers.get(n, "memory") for n in range(number)]),
            missing=at,
            end=end,
            page_size=self.page_size,
        )

    def _end_at(self, point: RestorePoint, number: int, group: int) -> ReuseEnd:
        is_in_memory = number < len(point.path) and point.path[number] is not None
        if is_in_memory and group == len(self.groups):
            return ReuseEnd.NO_SNAPSHOT
        if is_in_memory and self.groups[group].recycles:
            return ReuseEnd.WINDOW
        if not self.prefix.existed(point.names.name(number)):
            return ReuseEnd.NEW
        only_windows = len(self._recycling) == len(self.groups)  # what they drop is gone at once
        return ReuseEnd.WINDOW if only_windows else ReuseEnd.EVICTED

    def names_of(self, sequence: Sequence) -> PageNames:
        root, names = self.prefix.root_of(sequence.namespace), sequence.names
        if names is None or names.root != root:
            names = sequence.names = self.prefix.names(sequence.namespace, sequence.key_ids)
        names.token_ids = sequence.key_ids
        return names

    def _lookup(self, sequence: Sequence, spare: int) -> RestorePoint | None:
        """Lock the longest prefix that leaves room for the rest of a sequence; None: none does.

        A prefix that ends inside of a page needs one more page, for a copy. If only that page does
        not fit, its tokens are computed again.
        """
        limit = 0 if sequence.request.prompt_logits or not self.reuse else None
        point = self.probe(sequence, limit=limit)
        while True:
            request = sequence.request
            lease = self.prefix.lock(point, priority=request.page_priority, tenant=request.tenant)
            if self._room(point, sequence, spare):
                sequence.lease = lease
                self.prefix.tokens_reused += point.num_tokens
                return point
            self.prefix.release(lease)
            if not point.cut_tokens:
                return None
            point = self.probe(sequence, limit=point.num_tokens, whole_pages=True)

    def _room(self, point: RestorePoint, sequence: Sequence, spare: int) -> bool:
        for group, shared in enumerate(point.tables):
            needed = self.groups[group].max_pages(len(sequence.token_ids) + 1) - len(
                shared.all_pages
            )
            tenant = sequence.request.tenant if spare else None  # alone it may have everything
            free = self.allocators[group].num_free + self.prefix.num_evictable(group, tenant)
            if needed + spare > free:
                return False
        return True

    def shares_later(self, sequence: Sequence, others: Seq[Sequence]) -> bool:
        """Whether a sequence could share more later, with a prompt that is being computed now."""
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
        """Tokens that `other` must compute before the common prefix can be shared; 0: none."""
        ids, known, size = sequence.key_ids, other.key_ids, self.page_size
        stop = min(len(known), len(ids) - 1)
        if stop <= size or ids[:size] != known[:size] or other.namespace != sequence.namespace:
            return 0
        common = min(common_length(ids, known), stop)
        common -= common % size
        if common <= self.probe(sequence).num_tokens:
            return 0
        if self._states is not None and not self._states.will_stop_at(other, common):
            return 0
        return common

    def next_boundary(self, sequence: Sequence) -> int | None:
        """The next position, a whole number of pages, at which a prefill chunk must end.

        None: it may end anywhere. A layer's state can be kept only as a step leaves it.
        """
        return self._states.next_boundary(sequence) if self._states is not None else None

    # -- before a step --------------------------------------------------------------------------

    def take_work(self) -> CacheWork:
        """The work on the cache's arrays before the next step.

        Its copies count as done: the pages that they read may be evicted from now on.
        """
        spills, loads = self._store.take() if self._store else ([], [])
        work = CacheWork(self._closing, spills, loads, list(self._copies.values()))
        begun = [*self._copies]
        if self._states is not None:
            begun += self._states.take(work)
        for sequence in begun:
            self.prefix.release_copied(sequence.required_lease)
        self._closing, self._copies = [], {}
        return work

    # -- going on -------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, num_tokens: int, *, everything: bool = False) -> bool:
        """Take the pages that `num_tokens` positions need, evicting what is unused.

        Args:
            everything: also what other tenants left within their shares.

        Returns:
            False: all that is left of a group is in use; it may have got those of others.
        """
        for group in range(len(sequence.tables)):  # none: it was preempted
            if not self._extend(sequence, group, num_tokens, everything=everything):
                return False
        return True

    def _extend(self, sequence: Sequence, group: int, num_tokens: int, *, everything: bool) -> bool:
        table = sequence.tables[group]
        end = table.end
        if num_tokens <= end:
            return True
        missing = -(-(num_tokens - end) // self.page_size)
        allocator = self.allocators[group]
        if missing > allocator.num_free:
            tenant, count = sequence.request.tenant, missing - allocator.num_free
            self.prefix.evict(group, count, tenant, everything=everything)
        if missing > allocator.num_free:
            return False
        table.append(allocator.allocate(missing, after=table.last))
        return True

    def wrote(self, sequence: Sequence, *, of_answer: bool = False) -> None:
        """Note that the step being launched writes whole pages of a sequence.

        Pages of an answer get their names when it ends, or earlier if a window is about to recycle
        them.
        """
        if self._recycling or not of_answer:
            self._written.append(sequence)

    def settle(self, running: Seq[Sequence]) -> bool:
        """Between two launches: name the pages just written; recycle pages behind windows.

        Returns:
            Whether a page was replaced by an equal one that was there before.
        """
        replaced = False
        for sequence in self._written if self.reuse else ():
            if sequence.lease is not None:
                names = self.names_of(sequence)
                replaced |= self.prefix.extend(sequence.lease, names, sequence.num_sealed)
                if self._states is not None:
                    self._states.settle(sequence)
        self._written = []
        if self._recycling:
            for sequence in running:
                for g, group in self._recycling:
                    dropped = group.recycle(sequence.tables[g], sequence.num_computed)
                    if dropped:
                        self.prefix.give_back(sequence.required_lease, g, dropped)
        return replaced

    # -- ending ---------------------------------------------------------------------------------

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Release the pages of a sequence; with `keep`, later requests can reuse them."""
        lease, names = sequence.required_lease, self.names_of(sequence)
        self._copies.pop(sequence, None)
        if keep and self.reuse:
            written = sequence.num_sealed
            if sequence.started:
                written = min(sequence.num_computed, len(sequence.token_ids))
            written -= written % self.prefix.alignment
            if written > sequence.num_sealed:
                tables = [table.copy() for table in sequence.tables]
                self._closing.append(Move(tables, sequence.slot, sequence.num_sealed, written))
            self.prefix.extend(lease, names, written)
            self.prefix.add_partial(lease, names, written)
            if self._states is not None:
                self._states.snapshot(sequence, written)
            if self._store is not None and sequence.request.id_slot is not None:
                place = sequence.request.owner, sequence.request.id_slot
                self._remember(place, (sequence.namespace, sequence.key_ids[:written]))
        if self._states is not None:
            self._states.end(sequence)
        self.prefix.release(lease)
        sequence.tables = []
        sequence.lease = sequence.names = None
        sequence.sharers = {}

    # -- prompts that may be saved --------------------------------------------------------------

    def _remember(self, place: ClientSlot, prompt: tuple[Namespace | None, list[int]]) -> None:
        self._prompts.pop(place, None)
        self._prompts[place] = prompt
        places = [other for other in self._prompts if other[0] == place[0]]
        if len(places) > MAX_PLACES:
            del self._prompts[places[0]]

    def prompt_of(self, place: ClientSlot) -> tuple[Namespace | None, list[int]]:
        """Namespace and ids (computed ones only) of the last request of a slot that ended.

        Raises:
            InvalidRequestError: there was none.
        """
        if place not in self._prompts:
            raise InvalidRequestError.of(
                "id_slot", f"{place[1]} has no prompt since the model was loaded; send a request."
            )
        return self._prompts[place]

    def load(self, place: ClientSlot, prompt: tuple[Namespace | None, list[int]]) -> None:
        assert self._store is not None
        self._remember(place, prompt)
        namespace, ids = prompt
        names = self.prefix.names(namespace, [*ids, 0])  # the last one comes next
        self._store.fetch(self.prefix, self.prefix.probe(names), lambda _: True)

    def forget(self) -> None:
        """Drop everything that was computed, after a failed step: no prompt finds it again."""
        self._closing, self._written, self._copies = [], [], {}
        if self._store is not None:
            self._store.forget()
        self.prefix.clear()
        if self._states is not None:
            self._states.forget()
