"""Who runs next and with how many tokens. Pure Python: knows pages, slots and counts, no arrays.

Decode comes first, then prefill chunks within a token budget (`shares.py`), which is halved while
others run.

A step may be in flight while the next one is planned. Pages given up meanwhile are safe: the pool
is written only behind a barrier (`Batch.writes_pages`).
"""

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from ..cache.pages import OutOfPages, PageAllocator
from ..cache.reach import Reach
from ..cache.sealing import Move
from ..core import FinishReason, Request
from .batch import MAX_SHORT, Batch, Restore, Segment, sampling_of
from .counters import Counters
from .decodes import Decodes
from .holdings import Holdings
from .pagestore import PageStore
from .sequence import Sequence
from .shares import prefill_shares
from .unwritten import Unwritten


@dataclass(slots=True)
class Taken:
    """What came of a step's tokens, by row of its `sampling`; of most there is nothing to say."""

    ended: dict[int, FinishReason] = field(default_factory=dict)  # with this token
    late: list[int] = field(default_factory=list)  # had ended before: the token is thrown away
    away: list[int] = field(default_factory=list)  # gave up the slot: these, and who was preempted


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        reaches: what each layer group keeps.
        allocators: the pages of each group.
        page_size: tokens a page.
        max_batch: sequences that may run at once.
        prefill_chunk: prompt tokens a step, all sequences together.
        reuse: whether prompts may use the KV that earlier requests left.
        store: where evicted pages go, and come back from.
    """

    def __init__(
        self,
        *,
        reaches: Seq[Reach],
        allocators: Seq[PageAllocator],
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        reuse: bool = True,
        store: PageStore | None = None,
    ) -> None:
        assert len(reaches) == len(allocators)
        assert prefill_chunk % page_size == 0
        self.holdings = Holdings(
            reaches=reaches,
            allocators=allocators,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            reuse=reuse,
            store=store,
        )
        self.page_size = page_size
        self.prefill_chunk = prefill_chunk
        self._max_short = min(MAX_SHORT, page_size)  # fits in a tail beside a page begun
        self.waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self.counters = Counters()
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_batch))  # a heap: low slots first keeps tails small
        self._admitted: list[Sequence] = []
        self._restores: list[Restore] = []
        self._last: Decodes | None = None  # of the last step, while nobody joined or left
        self._unwritten = Unwritten([])

    @property
    def idle(self) -> bool:
        """Every request has ended."""
        return not self._by_id

    @property
    def running(self) -> list[Sequence]:
        """Those that hold a slot, in order of admission."""
        self._unwritten.write()
        return self._running

    # -- arrivals and departures ----------------------------------------------------------------

    def add(self, request: Request, *, max_output: int) -> Sequence:
        """Queue a request that was found valid."""
        sequence = Sequence(
            request=request,
            max_known=len(request.prompt_ids) + max_output,
            token_ids=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
        )
        self._by_id[request.id] = sequence
        self.waiting.append(sequence)
        self.counters.requests += 1
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of a request."""
        self._unwritten.write()
        return self._by_id.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """All that run or wait."""
        self._unwritten.write()
        return list(self._by_id.values())

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence and give back what it holds; a launched step of it is ignored later.

        With `keep` later requests may use what was computed.
        """
        assert not sequence.finished
        sequence.finished = True
        del self._by_id[sequence.request.id]
        if sequence.slot >= 0:
            self._release(sequence, keep)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Back to the head of the queue; what of it is evicted meanwhile is computed again."""
        self._release(sequence, keep)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.num_preempted += 1
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool) -> None:
        self._unwritten.write()
        self._last, self._unwritten = None, Unwritten([])
        self._running.remove(sequence)
        self.holdings.end(sequence, keep=keep)
        self._restores = [r for r in self._restores if r.sequence is not sequence]
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        sequence.started = False

    # -- the next step --------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """What to compute next; None where nothing can be done now."""
        if self.holdings.unsettled and self.holdings.settle(self.running):
            self._last = None
        decodes = self._next_decodes()
        segments, decodes = self._next_prefills(decodes)
        if not segments and not decodes:
            assert self.idle or any(s.num_pending for s in self.unfinished()), "stuck"
            return None
        batch = Batch(
            decodes,
            short=sorted([s for s in segments if not s.seals], key=lambda s: s.num_tokens > 1),
            long=[s for s in segments if s.seals],
            seal=self.holdings.take_closing(),
        )
        batch.admitted, self._admitted = self._admitted, []
        batch.spill, batch.load = self.holdings.take_transfers()
        batch.restore, self._restores = self._restores, []
        self._seal_tails(batch)
        self._launch(batch)
        return batch

    def commit(self, batch: Batch, token_ids: Seq[int]) -> Taken:
        """Take in the tokens that a step sampled, one for each row of `batch.sampling`."""
        taken, stop_ids = Taken(), batch.sampling.told.stop_ids
        # Few tokens can end anything; which do is looked at one by one.
        last_ones = bool(batch.prefills) or batch.decodes.steps_left <= 1
        steady = self._unwritten.sequences is batch.sampling.sequences
        if steady and not last_ones and stop_ids.isdisjoint(token_ids):
            self._unwritten.read(token_ids)
            self.counters.tokens_sampled += len(token_ids)
            return taken
        if steady:
            self._unwritten.read_one_by_one()
        else:
            self._unwritten.write()
        rows = zip(batch.sampling.sequences, token_ids, strict=True)
        for row, (sequence, token_id) in enumerate(rows):
            sequence.num_pending -= 1
            if sequence.slot < 0:
                taken.away.append(row)
                if sequence.finished:
                    taken.late.append(row)
                    continue
            sequence.token_ids.append(token_id)
            if last_ones or token_id in stop_ids:
                reason = _finish_reason(sequence, token_id)
                if reason is not None:
                    self.finish(sequence)
                    taken.ended[row] = reason
        self.counters.tokens_sampled += len(batch.sampling) - len(taken.late)
        return taken

    def _next_decodes(self) -> Decodes:
        """The newest token of every sequence whose prompt is computed, where there is room."""
        last = self._last
        if last is not None and last.steps_left > 1:
            decodes = last.moved_on()
        else:
            decodes = Decodes.of(self.running)
        rows = decodes.at_page_start(self.page_size)
        if not rows:
            return decodes
        crowded = [decodes.sequences[row] for row in rows]
        num_tokens = (decodes.spans.starts[rows] + 1).tolist()
        if self.holdings.extend_each(crowded, num_tokens):
            return decodes
        preemptions = self.counters.preemptions
        for sequence, count in zip(crowded, num_tokens, strict=True):
            if sequence.slot >= 0:  # else it just had to make room
                self._hold(sequence, count)
        return self._still_there(decodes, preemptions)

    def _still_there(self, decodes: Decodes, preemptions: int) -> Decodes:
        """Without those who had to make room for others, since there were so many preemptions."""
        return decodes if self.counters.preemptions == preemptions else decodes.still_running()

    def _next_prefills(self, decodes: Decodes) -> tuple[list[Segment], Decodes]:
        """Prompts in work, and from the queue those for which there is room; who decodes still."""
        all_decode = len(decodes) == len(self._running)
        if all_decode and not (self.waiting and self._free_slots):
            return [], decodes
        preemptions = self.counters.preemptions
        prefilling = [] if all_decode else _prefilling(self.running)
        max_prefilling = self.prefill_chunk // self.page_size  # each gets a page at least
        while len(prefilling) < max_prefilling and (admitted := self._admit(prefilling)):
            prefilling.append(admitted)
        budget = self.prefill_chunk
        if len(self._running) > 1:  # the budget is what the others wait for
            budget = max(budget // 2, self.page_size)
        shares = [
            (sequence, count)
            for sequence, count in prefill_shares(prefilling, budget, self.page_size)
            if sequence.slot >= 0 and self._hold(sequence, sequence.num_computed + count)
        ]
        segments = [self._prefill(s, count) for s, count in shares if s.slot >= 0]
        return segments, self._still_there(decodes, preemptions)

    def _prefill(self, sequence: Sequence, count: int) -> Segment:
        return Segment(
            sequence=sequence,
            start=sequence.num_computed,
            num_tokens=count,
            sealed=sequence.num_sealed,
            slot=sequence.slot,
            tables=sequence.tables,
            samples=count == sequence.num_left,
            output_index=sequence.num_output,
            seals=count > self._max_short,
        )

    def _launch(self, batch: Batch) -> None:
        """Count the step as computed: it will be by the time that anything depends on it."""
        if self._unwritten.sequences is not batch.decodes.sequences:
            self._unwritten.write()
            self._unwritten = Unwritten(batch.decodes.sequences)
        self._unwritten.launched()
        row = len(batch.decodes)
        for segment in batch.prefills:
            sequence = segment.sequence
            segment.row = row
            row += segment.num_tokens
            sequence.started = True
            sequence.num_computed += segment.num_tokens
            sequence.num_pending += segment.samples
            if segment.samples:  # nobody waits for it any more
                sequence.sharers = {}
        for segment in batch.long:
            segment.sequence.num_sealed = segment.stop - segment.stop % self.page_size
            self.holdings.wrote(segment.sequence)
        for restore in batch.restore:
            self.holdings.tree.release_cut(restore.sequence.lease_of)
        batch.sampling = sampling_of(batch.decodes, batch.prefills)
        batch.num_tokens = row
        self._last = None if batch.prefills or batch.admitted else batch.decodes  # they may join
        self.counters.steps += 1
        self.counters.tokens_computed += row
        self.counters.prompt_tokens_computed += _num_prompt_tokens(batch.prefills)

    # -- tails ----------------------------------------------------------------------------------

    def _seal_tails(self, batch: Batch) -> None:
        """Move tail pages into the pool before the step: every full one, if any tail is full.

        All at once, because the barrier that it takes costs the same for one as for all. A step
        that writes pages anyhow has its barrier, so it seals too.
        """
        fullest = max([s.stop - s.sealed for s in batch.short], default=0)
        fullest = max(fullest, batch.decodes.fullest)
        if fullest <= 2 * self.page_size and not batch.writes_pages:
            return
        spans = batch.decodes.spans
        stops = np.maximum(spans.starts - spans.starts % self.page_size, spans.sealed)
        sequences, stops_of = batch.decodes.sequences, stops.tolist()
        for row in np.flatnonzero(stops > spans.sealed).tolist():
            batch.seal.append(self._seal(sequences[row], stops_of[row]))
        batch.decodes = batch.decodes.sealed_to(stops)
        for segment in batch.prefills:
            stop = segment.start - segment.start % self.page_size
            if stop > segment.sealed:
                batch.seal.append(self._seal(segment.sequence, stop))
                segment.sealed = stop

    def _seal(self, sequence: Sequence, stop: int) -> Move:
        start = sequence.num_sealed
        sequence.num_sealed = stop
        self.counters.pages_sealed += (stop - start) // self.page_size
        if start < sequence.num_prompt:
            self.holdings.wrote(sequence)
        else:
            self.holdings.wrote_answer(sequence)
        return Move(sequence.tables, sequence.slot, start, stop)

    # -- pages ----------------------------------------------------------------------------------

    def _admit(self, prefilling: Seq[Sequence]) -> Sequence | None:
        """Start the first in the queue for which there is room, in order of arrival.

        One that will soon share what another computes waits for it, and is passed by.
        """
        if not self._free_slots:
            return None
        for sequence in self.waiting:
            if sequence.num_pending:
                return None  # preempted with a step in flight, whose token it gets first
            if self.holdings.shares_later(sequence, prefilling):
                continue
            try:
                restore = self.holdings.begin(sequence, spare=len(self._running))
            except OutOfPages:
                return None
            self.waiting.remove(sequence)
            sequence.slot = heapq.heappop(self._free_slots)
            self._running.append(sequence)
            self._admitted.append(sequence)
            self._restores += [restore] if restore else []
            return sequence
        return None

    def _hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the pages for `num_tokens` positions, from the youngest others if need be.

        False: the sequence itself is the youngest and went back to the queue.
        """
        while True:
            try:
                self.holdings.extend(sequence, num_tokens)
                return True
            except OutOfPages:
                youngest = self._running[-1]
                assert len(self._running) > 1, "a request that fits alone was admitted"
                self.preempt(youngest)
                if youngest is sequence:
                    return False


def _prefilling(running: Seq[Sequence]) -> list[Sequence]:
    """Those whose prompts are in work."""
    return [s for s in running if s.num_left > 0 and not s.decoding]


def _num_prompt_tokens(segments: Seq[Segment]) -> int:
    """How many tokens of prompts a step computes; the rest are of answers."""
    ends = [(s.start, min(s.stop, s.sequence.num_prompt)) for s in segments]
    return sum([stop - start for start, stop in ends if start < stop])


def _finish_reason(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Why a sequence ends with this token, where it may; None: it goes on."""
    request = sequence.request
    if token_id in request.stop_ids and sequence.num_answered > request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_known >= sequence.max_known else None
