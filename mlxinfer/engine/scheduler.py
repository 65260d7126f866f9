"""Who runs next and with how many tokens. Pure Python: knows pages, slots and counts, no arrays.

Decode comes first, then prefill chunks within a token budget (`shares.py`), which is halved while
others run.

A step may be in flight while the next one is planned. Pages given up meanwhile are safe: the pool
is written only behind a barrier (`Batch.writes_pages`).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ..cache.pages import PageAllocator
from ..cache.window import AttentionWindow
from ..core import FinishReason
from .batch import MAX_SHORT, Batch, Segment, sampling_of
from .counters import Counters
from .decodes import DecodeBatch
from .kv_manager import KVManager
from .pagestore import PageStore
from .queues import RequestQueues
from .sequence import Sequence
from .shares import prefill_shares
from .tails import Tails
from .unwritten import Unwritten


@dataclass(slots=True)
class CommitResult:
    """What came of a step's tokens, by row of its `sampling`; of most there is nothing to say."""

    finished: dict[int, FinishReason] = field(default_factory=dict)  # with this token
    discarded: list[int] = field(default_factory=list)  # had ended before: the token is thrown away
    released: list[int] = field(
        default_factory=list
    )  # gave up the slot: these, and who was preempted


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        windows: what each layer group keeps.
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
        windows: Seq[AttentionWindow],
        allocators: Seq[PageAllocator],
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        reuse: bool = True,
        store: PageStore | None = None,
    ) -> None:
        assert len(windows) == len(allocators)
        assert prefill_chunk % page_size == 0
        self.kv_manager = KVManager(
            windows=windows,
            allocators=allocators,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            reuse=reuse,
            store=store,
        )
        self.page_size = page_size
        self.prefill_chunk = prefill_chunk
        self._max_short = min(MAX_SHORT, page_size)  # fits in a tail beside a page begun
        self.counters = Counters()
        self.queues = RequestQueues(self.kv_manager, self.counters, max_batch=max_batch)
        self._tails = Tails(self.kv_manager, self.counters, page_size)
        self._last: DecodeBatch | None = (
            None  # of the last step; its rows move on while nobody joins
        )

    # -- the next step --------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """What to compute next; None where nothing can be done now."""
        queues = self.queues
        if self.kv_manager.unsettled and self.kv_manager.settle(queues.running):
            self._last = None
        decodes = self._next_decodes()
        segments, decodes = self._next_prefills(decodes)
        if not segments and not decodes:
            assert queues.idle or any(s.num_pending for s in queues.unfinished()), "stuck"
            return None
        batch = Batch(
            decodes,
            short=sorted([s for s in segments if not s.seals], key=lambda s: s.num_tokens > 1),
            long=[s for s in segments if s.seals],
            seal=self.kv_manager.take_closing(),
        )
        batch.admitted, batch.restore = queues.take_admitted()
        batch.spill, batch.load = self.kv_manager.take_transfers()
        self._tails.seal(batch)
        self._launch(batch)
        return batch

    def commit(self, batch: Batch, token_ids: Seq[int]) -> CommitResult:
        """Take in the tokens that a step sampled, one for each row of `batch.sampling`."""
        result, stop_ids, unwritten = (
            CommitResult(),
            batch.sampling.event_fields.stop_ids,
            self.queues.unwritten,
        )
        # Few tokens can end anything; which do is looked at one by one.
        last_ones = bool(batch.prefills) or batch.decodes.steps_left <= 1
        steady = unwritten.sequences is batch.sampling.sequences
        if steady and not last_ones and stop_ids.isdisjoint(token_ids):
            unwritten.read(token_ids)
            self.counters.tokens_sampled += len(token_ids)
            return result
        if steady:
            unwritten.read_one_by_one()
        else:
            unwritten.write()
        rows = zip(batch.sampling.sequences, token_ids, strict=True)
        for row, (sequence, token_id) in enumerate(rows):
            sequence.num_pending -= 1
            if sequence.slot < 0:
                result.released.append(row)
                if sequence.finished:
                    result.discarded.append(row)
                    continue
            sequence.token_ids.append(token_id)
            if last_ones or token_id in stop_ids:
                reason = _finish_reason(sequence, token_id)
                if reason is not None:
                    self.queues.finish(sequence)
                    result.finished[row] = reason
        self.counters.tokens_sampled += len(batch.sampling) - len(result.discarded)
        return result

    def _next_decodes(self) -> DecodeBatch:
        """The newest token of every sequence whose prompt is computed, where there is room."""
        last = self._last
        steady = last is not None and last.sequences is self.queues.unwritten.sequences
        if last is not None and steady and last.steps_left > 1:
            decodes = last.advance()
        else:
            decodes = DecodeBatch.of(self.queues.running)
        rows = decodes.at_page_start(self.page_size)
        if not rows:
            return decodes
        crowded = [decodes.sequences[row] for row in rows]
        num_tokens = (decodes.spans.starts[rows] + 1).tolist()
        if self.kv_manager.extend_each(crowded, num_tokens):
            return decodes
        preemptions = self.counters.preemptions
        for sequence, count in zip(crowded, num_tokens, strict=True):
            if sequence.slot >= 0:  # else it just had to make room
                self.queues.hold(sequence, count)
        return self._still_there(decodes, preemptions)

    def _still_there(self, decodes: DecodeBatch, preemptions: int) -> DecodeBatch:
        """Without those who had to make room for others, since there were so many preemptions."""
        return decodes if self.counters.preemptions == preemptions else decodes.without_preempted()

    def _next_prefills(self, decodes: DecodeBatch) -> tuple[list[Segment], DecodeBatch]:
        """Prompts in work, and from the queue those for which there is room; who decodes still."""
        queues = self.queues
        all_decode = len(decodes) == queues.num_running
        if all_decode and not queues.may_admit:
            return [], decodes
        preemptions = self.counters.preemptions
        prefilling = [] if all_decode else _prefilling(queues.running)
        max_prefilling = self.prefill_chunk // self.page_size  # each gets a page at least
        while len(prefilling) < max_prefilling and (admitted := queues.admit(prefilling)):
            prefilling.append(admitted)
        budget = self.prefill_chunk
        if queues.num_running > 1:  # the budget is what the others wait for
            budget = max(budget // 2, self.page_size)
        shares = [
            (sequence, count)
            for sequence, count in prefill_shares(prefilling, budget, self.page_size)
            if sequence.slot >= 0 and queues.hold(sequence, sequence.num_computed + count)
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
        queues = self.queues
        if queues.unwritten.sequences is not batch.decodes.sequences:
            queues.unwritten.write()
            queues.unwritten = Unwritten(batch.decodes.sequences)
        queues.unwritten.launched()
        for sequence in batch.admitted:  # some are given no token in it, but what they share
            sequence.started = sequence.slot >= 0
        row = len(batch.decodes)
        for segment in batch.prefills:
            sequence = segment.sequence
            segment.row = row
            row += segment.num_tokens
            sequence.num_computed += segment.num_tokens
            sequence.num_pending += segment.samples
            if segment.samples:  # nobody waits for it any more
                sequence.sharers = {}
        for segment in batch.long:
            segment.sequence.num_sealed = segment.stop - segment.stop % self.page_size
            self.kv_manager.wrote(segment.sequence)
        for restore in batch.restore:
            self.kv_manager.tree.release_cut(restore.sequence.lease_of)
        batch.sampling = sampling_of(batch.decodes, batch.prefills)
        batch.num_tokens = row
        self._last = None if batch.prefills or batch.admitted else batch.decodes  # they may join
        self.counters.steps += 1
        self.counters.tokens_computed += row
        self.counters.prompt_tokens_computed += _num_prompt_tokens(batch.prefills)


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
