"""Which requests wait and run, and what each step computes. Pure Python: knows no arrays of MLX.

A step has one token of every sequence that decodes, then chunks of prompts. `PrefillSizer` says
how many prompt tokens.

With pipeline stages, each step takes a micro-batch: rows that are not part of a step in flight.
While later stages work on it, this rank begins the next step, with other rows. So the tokens of a
row are known when its next step is planned, and accepted proposals of one step do not change
another step in flight. Source: GPipe, arXiv:1811.06965.

A step may be in flight while the next one is planned. Pages that are given up meanwhile are safe:
a step that writes pages waits for the step in flight (`Batch.writes_pages`).
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..cache.inputs import Move
from ..core import FinishReason, Request
from ..fair import Shares, Tenant
from .batch import (
    MAX_SHORT,
    Batch,
    CommitResult,
    DecodeBatch,
    Proposal,
    Segment,
    Sequence,
)
from .grammar_masks import num_allowed
from .kv_manager import KVManager
from .prefill import PrefillSizer
from .prompt_pictures import PromptPictures
from .rows import DecodeRows

# Work of a token of an answer, where one of a prompt is 1: as in VTC, arXiv:2401.00588.
ANSWER_WORK = 2
SLICE = 256  # of work, after which tenants change slots that they cannot share


@dataclass(slots=True)
class EngineCounters:
    """Counts since the engine started."""

    requests: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    tokens_proposed: int = 0
    tokens_accepted: int = 0  # of the proposed ones
    preemptions: int = 0
    step_failures: int = 0
    pages_sealed: int = 0


class FeatureSource:
    """Says which tokens of prompts with pictures can be computed. Here: all, since none has any.

    Attributes:
        wanted: the pictures that running sequences wait for.
    """

    wanted: Collection[Any] = ()

    def available(self, sequence: Sequence, count: int) -> int:
        """How many of a sequence's next `count` tokens can be computed now."""
        return count

    def release(self, sequence: Sequence) -> None:
        """A sequence gives up its slot: it needs no features any more."""


NO_FEATURES = FeatureSource()


class RequestQueues:
    """Every unfinished request: waiting in order of arrival, or running with a slot and pages.

    Tenants share slots and pages: who waits for its part of them takes it from the youngest
    sequences of who has more.

    Args:
        kv_manager: what running sequences hold.
        counters: of requests and preemptions.
        max_batch: sequences that may run at once.
        features: of pictures, which running sequences hold, too.

    Attributes:
        shares: of the work of steps.
    """

    def __init__(
        self,
        kv_manager: KVManager,
        counters: EngineCounters,
        *,
        max_batch: int,
        features: FeatureSource = NO_FEATURES,
    ) -> None:
        self._features = features
        self.shares = Shares(SLICE)
        self._unfinished: Counter[Tenant] = Counter()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._kv = kv_manager
        self._counters = counters
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_batch))  # a heap: low slots first keeps tails small
        self.admitted: list[Sequence] = []  # since the last step, which takes them

    @property
    def idle(self) -> bool:
        """Whether no request can run: all have ended, or wait for pages of peers."""
        return all(sequence.fetch is not None for sequence in self._by_id.values())

    # -- arrivals and departures ----------------------------------------------------------------

    def add(
        self, request: Request, *, max_output: int, pictures: PromptPictures | None = None
    ) -> Sequence:
        """Queue a valid request; `pictures` are those of its prompt."""
        sequence = Sequence(
            request=request,
            max_known=len(request.prompt_ids) + max_output,
            token_ids=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
            pictures=pictures,
        )
        self._by_id[request.id] = sequence
        self._unfinished[request.tenant] += 1
        self.waiting.append(sequence)
        self._counters.requests += 1
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """All running and waiting sequences."""
        return list(self._by_id.values())

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence and release what it holds; tokens of a launched step are discarded.

        Args:
            keep: whether later requests may use what was computed.
        """
        assert not sequence.finished
        sequence.finished = True
        if sequence.fetch is not None:
            sequence.fetch.cancel()
        del self._by_id[sequence.request.id]
        self._unfinished[sequence.request.tenant] -= 1
        self._unfinished += Counter()  # without those that have none left
        if sequence.slot >= 0:
            self._release(sequence, keep)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Put a running sequence back at the head of the queue, with its tokens.

        Its pages stay in the prefix cache. Only the pages that are evicted meanwhile are computed
        again.
        """
        self._release(sequence, keep)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.num_preempted += 1
        self.waiting.appendleft(sequence)
        self._counters.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool) -> None:
        self.running.remove(sequence)
        self._kv.end(sequence, keep=keep)
        if sequence.pictures is not None:
            self._features.release(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        sequence.started = False

    # -- slots and pages ------------------------------------------------------------------------

    def admit(self, prefilling: Seq[Sequence], most: int, *, again: bool = True) -> Sequence | None:
        """Start the first waiting sequence for which there is room: of each tenant in its turn.

        A sequence waits if another one is computing tokens that it can share soon. Later sequences
        may pass it. Others may be preempted, see `Shares.giver`.

        Args:
            prefilling: running sequences with prompts to compute.
            most: how many of these there may be.
            again: whether preempted sequences may start: not in the step that preempted them, which
                may still have a token of theirs.
        """
        if not self.contested:
            if not self._free_slots or len(prefilling) >= most:
                return None
            sequence = self._next(self.waiting, prefilling, again=again)
            return self._start(sequence) if sequence is not None else None
        waiting: dict[Tenant, list[Sequence]] = {}
        for sequence in self.waiting:
            waiting.setdefault(sequence.request.tenant, []).append(sequence)
        self.shares.advance([*waiting, *(s.request.tenant for s in prefilling)])
        for tenant in sorted(self.shares.order(waiting), key=partial(self._would_lose, waiting)):
            candidate = self._next(waiting[tenant], prefilling, again=again)
            if candidate is None or not self._make_room(tenant, prefilling, most):
                continue
            while (started := self._start(candidate)) is None:
                if not self._take_from(self.running, tenant):
                    return None  # others do not pass it: it would never find room
            return started
        return None

    def _next(
        self, waiting: Iterable[Sequence], prefilling: Seq[Sequence], *, again: bool
    ) -> Sequence | None:
        """The first of the sequences of a tenant that may start, see `admit`."""
        for sequence in waiting:
            if sequence.fetch is not None:
                continue
            if sequence.num_pending:
                return None  # preempted during a step: it gets the token of that step first
            if sequence.num_preempted and not again:
                return None
            if not self._kv.shares_later(sequence, prefilling):
                return sequence
        return None

    def _start(self, sequence: Sequence) -> Sequence | None:
        """Give a sequence a slot, which is free, and its pages; None: these are not."""
        if not self._kv.begin(sequence, slot=self._free_slots[0], spare=len(self.running)):
            return None
        self.waiting.remove(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        self.running.append(sequence)
        self.admitted.append(sequence)
        return sequence

    # -- between tenants ------------------------------------------------------------------------

    @property
    def contested(self) -> bool:
        """Whether more than one tenant has unfinished requests."""
        return len(self._unfinished) > 1

    @property
    def tenants(self) -> Collection[Tenant]:
        """The tenants with unfinished requests."""
        return self._unfinished.keys()

    def _would_lose(self, waiting: Iterable[Tenant], tenant: Tenant) -> bool:
        """Whether one more slot of a tenant would be taken by another that waits."""
        held = Counter([tenant, *(s.request.tenant for s in self.running)])
        return any(self.shares.giver(held, other) == tenant for other in waiting)

    def _make_room(self, tenant: Tenant, prefilling: Seq[Sequence], most: int) -> bool:
        """Free a slot for a tenant, and one of the places of prompts; False: it has its part."""
        if len(prefilling) >= most and not self._take_from(prefilling, tenant):
            return False
        return bool(self._free_slots) or self._take_from(self.running, tenant)

    def _take_from(self, sequences: Seq[Sequence], tenant: Tenant) -> bool:
        """Preempt the youngest of who holds more of these than a tenant; False: nobody does."""
        running = [sequence for sequence in sequences if sequence.slot >= 0]
        giver = self.shares.giver(Counter([s.request.tenant for s in running]), tenant)
        if giver is None:
            return False
        self.preempt(next(s for s in reversed(running) if s.request.tenant == giver))
        return True

    def charge(self, batch: Batch) -> None:
        """Count the work of a step for its tenants."""
        work: Counter[Tenant] = Counter()
        for sequence in batch.decodes.sequences:
            work[sequence.request.tenant] += ANSWER_WORK
        for segment in batch.ragged:
            of_answer = segment.num_samples * (ANSWER_WORK - 1)
            work[segment.sequence.request.tenant] += segment.num_tokens + of_answer
        for tenant, count in work.items():
            self.shares.charge(tenant, count)

    def hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the pages for `num_tokens` positions; if need be, the youngest others are preempted.

        These are of the tenant that holds most for its weight, if others hold less.

        Returns:
            False: the sequence itself is the first to go, and went back to the queue.
        """
        while not self._kv.extend(sequence, num_tokens, everything=len(self.running) == 1):
            assert len(self.running) > 1, "a request that fits alone was admitted"
            tenant = sequence.request.tenant
            others = [other for other in self.running if other is not sequence]
            if self.contested and self._take_from(others, tenant):
                continue
            youngest = next(s for s in reversed(self.running) if s.request.tenant == tenant)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True


class Proposer(Protocol):
    """Proposes the next tokens of sequences, so that one step verifies several tokens of each.

    Proposals change how many steps an answer takes, and never its tokens.

    Attributes:
        taps: layers whose outputs the proposer reads, see `layers.step.Taps`.
    """

    taps: Seq[int] = ()

    def depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """Upper limit of proposed tokens per sequence in the next step.

        0: no proposals; then the next step is launched while this one runs. Otherwise the step in
        flight is read first, unless micro-batches take turns.

        Args:
            sequences: that decode in the step.
            num_decoding: sequences that decode in all micro-batches together.
        """
        ...

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        """Up to `depth` tokens for each sequence that may follow its `token_ids`."""
        ...

    def take(self, batch: Batch, hidden: Any) -> None:
        """Read the outputs (T, n * hidden) of the n layers of `taps`, before `observe`."""

    def observe(self, batch: Batch, result: CommitResult) -> None:
        """Learn from a step that was read, with or without proposals."""

    def stats(self) -> dict[str, Any]:
        """Plain numbers of the proposals."""
        return {}


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        kv_manager: gives pages to sequences.
        max_batch: sequences that may run at once.
        prefill_chunk: prompt tokens a step at most, all sequences together.
        prefill_slice_s, prefill_fixed: see `PrefillSizer`.
        proposer: of tokens to verify; None: a step computes one token of each answer.
        counters: of an earlier scheduler; the counts go on.
        num_stages: steps that may be in flight at once, each with other rows; 1: a step has all.
        features: of pictures.
    """

    def __init__(
        self,
        kv_manager: KVManager,
        *,
        max_batch: int,
        prefill_chunk: int,
        prefill_slice_s: float | None = None,
        prefill_fixed: int | None = None,
        proposer: Proposer | None = None,
        counters: EngineCounters | None = None,
        num_stages: int = 1,
        features: FeatureSource = NO_FEATURES,
    ) -> None:
        self.kv_manager = kv_manager
        self._features = features
        self.page_size = kv_manager.page_size
        self.counters = counters or EngineCounters()
        self.queues = RequestQueues(
            self.kv_manager, self.counters, max_batch=max_batch, features=features
        )
        self.prefill = PrefillSizer(
            page_size=self.page_size,
            most=prefill_chunk,
            slice_s=prefill_slice_s,
            fixed=prefill_fixed,
            num_stages=num_stages,
            tenants=self.queues.shares,
        )
        self._max_short = min(MAX_SHORT, self.page_size)  # fits in a tail beside a page begun
        self._proposer = proposer
        self._num_stages = num_stages
        self._rows: DecodeRows | None = None  # where times of steps may decide
        if num_stages == 1 and prefill_slice_s is not None:
            self._rows = DecodeRows(prefill_slice_s)
        self._contested = False  # whether tenants share the next step
        self._newest: Seq[Sequence] = ()  # that the last step samples for
        self._steady: list[DecodeBatch] = []  # the last of each group of rows, to go on from

    def reads_first(self, batch: Batch) -> bool:
        """Whether the step in flight is read before the next is planned.

        Proposals need the last token, so the step in flight is read first. The number of accepted
        proposals decides where the next step starts, and the time of a step with prompts decides
        how many prompt tokens the next one gets. A caller waits for the first token of an answer.
        With pipeline stages the next step has other rows, unless one sequence runs alone.
        """
        running = self.queues.running
        if self._num_stages > 1 and len(running) > 1:
            return False
        if self._num_stages == 1 and batch.ragged:
            return True
        return self._proposer is not None and self._proposer.depth(running, len(running)) > 0

    def max_in_flight(self, batch: Batch) -> int:
        """How many steps may stay in flight after this one was launched, this one included.

        One, if this step takes a token from the step before, which is then read next.
        """
        most = max(self._num_stages - 1, 1)
        depends = most > 1 and any(s.num_pending > 1 for s in batch.decodes.sequences)
        return 1 if depends else most

    # -- the next step --------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """The next step; None: nothing can be computed now."""
        queues = self.queues
        replaced = self.kv_manager.settle(queues.running)
        if replaced or queues.admitted:  # with other tables, in a turn that had nothing to compute
            self._steady = []
        self._contested = queues.contested
        decodes, verified, num_decoding = self._next_decodes()
        preemptions = self.counters.preemptions
        prefills = self._next_prefills(decodes, verified)
        preempted = self.counters.preemptions > preemptions  # perhaps features have room now
        if preempted:
            decodes, verified = _without_preempted(decodes, verified)
        segments = verified + prefills
        if not segments and not decodes.sequences:
            pending = any(s.num_pending for s in queues.unfinished())
            assert queues.idle or pending or preempted or self._features.wanted, "stuck"
            return None
        short: list[Segment] = []
        long: list[Segment] = []
        if segments:
            short = sorted([s for s in segments if not s.seals], key=lambda s: s.num_tokens > 1)
            long = [s for s in segments if s.seals]
        work, admitted = self.kv_manager.take_work(), queues.admitted
        queues.admitted = []
        batch = Batch(decodes, short, long, work, admitted, num_decoding=num_decoding)
        self._seal_tails(batch)
        self._count(batch)
        return batch

    def _next_decodes(self) -> tuple[DecodeBatch, list[Segment], int]:
        """The newest token of every sequence whose prompt is computed, if there is room for it.

        Sequences with proposals come as segments, the others as a batch of single tokens. The third
        value is the number of all sequences that decode, if the step has only some of them; else 0.
        """
        preemptions, num_decoding = self.counters.preemptions, 0
        decoding = [s for s in self.queues.running if s.decodes]
        if self._num_stages > 1:
            decoding, num_decoding = self._micro_batch(decoding)
        elif self._contested and self._rows is not None:
            decoding, num_decoding = self._rows_in_turn(self._rows, decoding)
        proposals = self._propose(decoding, num_decoding)
        singles = [s for s in decoding if s not in proposals] if proposals else decoding
        decodes = None
        for before in self._steady:
            if before.sequences == singles:
                decodes = before.advance()
        if decodes is None:
            decodes = DecodeBatch.of(singles)
        self._hold_decodes(decodes)
        verified = []
        for sequence, proposed in proposals.items():
            if sequence.slot >= 0 and self.queues.hold(sequence, sequence.num_computed + 1):
                verified.append(self._verification(sequence, proposed))
        if self.counters.preemptions > preemptions:
            decodes, verified = _without_preempted(decodes, verified)
        return decodes, verified, num_decoding

    def _micro_batch(self, decoding: list[Sequence]) -> tuple[list[Sequence], int]:
        """The sequences of the next step, and how many decode with those in flight.

        A sequence that runs alone may also be in the newest step: its token is taken from there.
        """
        running, newest = self.queues.running, self._newest
        if len(running) == 1:
            return [s for s in decoding if s.num_pending <= (s in newest)], 1
        num_decoding = sum([s.num_computed >= s.num_prompt for s in running])
        ready = [s for s in decoding if not s.num_pending]
        return ready[: -(-num_decoding // self._num_stages)], num_decoding

    def _rows_in_turn(
        self, rows: DecodeRows, decoding: list[Sequence]
    ) -> tuple[list[Sequence], int]:
        """The same where tenants share the step: each gets tokens as often as its share says."""
        rows.times.note(self.prefill.decoded)
        prefilling, page_s = self._tenants_of_prompts(), self.prefill.page_s
        chosen = rows.choose(decoding, prefilling, self.queues.tenants, page_s)
        return chosen, len(decoding) if len(chosen) < len(decoding) else 0

    def _tenants_of_prompts(self) -> set[Tenant]:
        """Tenants that have prompts to compute, or none of whose requests runs yet."""
        running = self.queues.running
        prompts = {s.request.tenant for s in running if s.num_computed < s.num_prompt}
        waiting = {s.request.tenant for s in self.queues.waiting if s.fetch is None}
        return prompts | waiting - {s.request.tenant for s in running}

    def _hold_decodes(self, decodes: DecodeBatch) -> None:
        """Take pages for new tokens that begin one; the youngest sequences may be preempted."""
        starts = decodes.segments.starts
        rows = np.flatnonzero(starts % self.page_size == 0).tolist()
        if not rows:
            return
        sequences = [decodes.sequences[row] for row in rows]
        num_tokens = (starts[rows] + 1).tolist()
        if not self.kv_manager.extend_each(sequences, num_tokens):
            for sequence, count in zip(sequences, num_tokens, strict=True):
                if sequence.slot >= 0:  # else it was just preempted
                    self.queues.hold(sequence, count)

    def _next_prefills(self, decodes: DecodeBatch, verified: list[Segment]) -> list[Segment]:
        """Chunks of running prompts, and of waiting ones for which there is room."""
        queues = self.queues
        all_decode = len(decodes.sequences) + len(verified) == len(queues.running)
        if all_decode and not queues.waiting:
            return []
        prefilling = []
        if not all_decode:
            behind = [s for s in queues.running if s.num_left > 0 and not s.num_pending]
            prefilling = [s for s in behind if not s.decodes]
        max_prefilling = self.prefill.fixed // self.page_size  # each gets a page at least
        preemptions = self.counters.preemptions
        while admitted := queues.admit(
            prefilling, max_prefilling, again=self.counters.preemptions == preemptions
        ):
            prefilling = [*(s for s in prefilling if s.slot >= 0), admitted]
        shares: list[tuple[Sequence, int]] = []
        room = self.prefill.most
        # A prompt that waits for a picture gets no share: perhaps another one has to go on first.
        ready = [s for s in prefilling if s.pictures is None or self._features.available(s, 1)]
        num_waiting = len(prefilling) - len(ready)
        beside = None
        if ready and self._contested and self._rows is not None:
            tenants = {sequence.request.tenant for sequence in ready}
            rows = [*decodes.sequences, *(segment.sequence for segment in verified)]
            beside = self._rows.beside(rows, tenants, queues.tenants)
            if beside is None:
                return []
        num_running = len(queues.running) - num_waiting
        for sequence, share in self.prefill.shares(ready, num_running, beside):
            if sequence.slot < 0:
                continue
            count = self._chunk(sequence, share)
            if 0 < count <= room and queues.hold(sequence, sequence.num_computed + count):
                shares.append((sequence, count))
                room -= count
        return [self._prefill(s, count) for s, count in shares if s.slot >= 0]

    def _chunk(self, sequence: Sequence, share: int) -> int:
        """Tokens of the next chunk of a prompt; 0 while features of its next picture are missing.

        The chunk ends where the KV manager wants it to end. It cuts no span of tokens that see each
        other: a span that is next is computed as a whole, even if it is longer than the share.
        """
        start, count = sequence.num_computed, share
        boundary = self.kv_manager.next_boundary(sequence)
        if boundary is not None:
            count = min(count, boundary - start)
        if sequence.pictures is None:
            return count
        count = sequence.pictures.uncut(start, start + count) - start
        return self._features.available(sequence, count)

    def _prefill(self, sequence: Sequence, count: int) -> Segment:
        """A chunk. If it ends inside of a page, it goes to pages, where the next chunk reads it."""
        stop = sequence.num_computed + count
        goes_on = count < sequence.num_left and stop % self.page_size > 0
        return Segment.following(sequence, count, seals=goes_on or count > self._max_short)

    # -- proposals ------------------------------------------------------------------------------

    def _propose(self, decoding: list[Sequence], num_decoding: int) -> dict[Sequence, Proposal]:
        """Proposals to verify, by sequence. Sequences with unread tokens get none, nor
        do those that gave NaN.

        Proposals are cut at the full length of the answer, and where a grammar forbids one.
        `num_decoding`: see `_next_decodes`.
        """
        proposer = self._proposer
        known = [s for s in decoding if not (s.num_pending or s.alone)]
        if proposer is None or not known:
            return {}
        depth = min(proposer.depth(known, num_decoding or len(known)), self._max_short - 1)
        if depth <= 0:
            return {}
        proposals: dict[Sequence, Proposal] = {}
        for sequence, proposed in zip(known, proposer.propose(known, depth), strict=True):
            usable = proposed.cut(min(depth, sequence.max_known - sequence.num_known - 1))
            if sequence.request.grammar is not None:
                usable = usable.cut(num_allowed(sequence.request, usable.token_ids))
            if usable.token_ids:
                proposals[sequence] = usable
        return proposals

    def _verification(self, sequence: Sequence, proposal: Proposal) -> Segment:
        """The newest token and its proposals, as many as free pages allow without preemption."""
        start = sequence.num_computed
        if not self.kv_manager.extend(sequence, start + 1 + len(proposal.token_ids)):
            end = min([table.end for table in sequence.tables])
            proposal = proposal.cut(end - start - 1)
        segment = Segment.following(sequence, 1, seals=False)
        segment.proposals, segment.weights = proposal
        segment.num_tokens = segment.num_samples = 1 + len(proposal.token_ids)
        return segment

    # -- sealing --------------------------------------------------------------------------------

    def _seal_tails(self, batch: Batch) -> None:
        """Add the full pages of all tails to a step that has a barrier anyway, or needs one now.

        A tail is a ring of two pages. A barrier costs the same for one tail as for all.
        """
        longest = max([s.stop - s.sealed for s in batch.short], default=0) if batch.short else 0
        if max(longest, batch.decodes.max_tail) <= 2 * self.page_size and not batch.writes_pages:
            return
        batch.held_slots = max([sequence.slot for sequence in self.queues.running]) + 1
        segments, sequences = batch.decodes.segments, batch.decodes.sequences
        stops = np.maximum(segments.starts - segments.starts % self.page_size, segments.sealed)
        for row in np.flatnonzero(stops > segments.sealed).tolist():
            batch.cache_work.seal.append(self._seal(sequences[row], int(stops[row])))
        batch.decodes = batch.decodes.sealed_to(stops)
        for segment in batch.ragged:
            stop = segment.start - segment.start % self.page_size
            if stop > segment.sealed:
                batch.cache_work.seal.append(self._seal(segment.sequence, stop))
                segment.sealed = stop

    def _seal(self, sequence: Sequence, stop: int) -> Move:
        start = sequence.num_sealed
        sequence.num_sealed = stop
        self.counters.pages_sealed += (stop - start) // self.page_size
        self.kv_manager.wrote(sequence, of_answer=start >= sequence.num_prompt)
        return Move(sequence.tables, sequence.slot, start, stop)

    # -- what is known of a step ----------------------------------------------------------------

    def _count(self, batch: Batch) -> None:
        """Count the step as computed, and note it for the next ones."""
        batch.count_computed(self.page_size)
        for segment in batch.ragged:
            sequence = segment.sequence
            self.counters.tokens_proposed += len(segment.proposals)
            of_prompt = min(segment.stop, sequence.num_prompt) - segment.start
            self.counters.prompt_tokens_computed += max(of_prompt, 0)
            sequence.request.num_drafted += len(segment.proposals)
            if segment.num_samples:  # no sequence waits for its prompt any more
                sequence.sharers = {}
        for segment in batch.long:
            self.kv_manager.wrote(segment.sequence)
        if self._contested:
            self.queues.charge(batch)
        self._note_steady(batch)
        self._newest = batch.sampling.sequences
        self.counters.steps += 1
        self.counters.tokens_computed += batch.num_tokens

    def _note_steady(self, batch: Batch) -> None:
        """Keep the decodes of a step while none of its sequences is in another step."""
        if batch.admitted:  # maybe again, in another slot
            self._steady = []
            return
        if self._num_stages == 1:  # each step is of all rows
            self._steady = []
        else:
            sequences = set(batch.sequences)
            self._steady = [
                steady for steady in self._steady if sequences.isdisjoint(steady.sequences)
            ]
        if not batch.ragged:
            self._steady = [*self._steady, batch.decodes][-self._num_stages :]

    def commit(self, batch: Batch, token_ids: Seq[int]) -> CommitResult:
        """Take in the tokens that a step sampled, one for each row of `batch.sampling`.

        Only this method ends answers by their tokens: end tokens, finished grammars, lengths. Rows
        after an end, or after a proposal that was not sampled, are discarded.
        """
        sampling, result = batch.sampling, CommitResult()
        assert len(token_ids) == len(sampling.sequences)
        proposals = sampling.proposals
        accepted = proposals.accepted(token_ids) if proposals is not None else None
        rows = zip(sampling.sequences, token_ids, strict=True)
        for row, (sequence, token_id) in enumerate(rows):
            sequence.num_pending -= 1
            if sequence.slot < 0:
                result.released.append(row)
            if sequence.finished or (accepted is not None and not accepted[row]):
                result.discarded.append(row)
                continue
            sequence.token_ids.append(token_id)
            if proposals is not None and proposals.counts[row]:
                self.counters.tokens_accepted += 1
                sequence.request.num_accepted += 1
                sequence.num_computed += sequence.slot >= 0  # the proposal before it held
            request, num_known = sequence.request, len(sequence.token_ids)
            if (
                num_known >= sequence.max_known
                or token_id in request.stop_ids
                or request.grammar is not None
            ):
                self._finish(sequence, token_id, row, result)
        self.counters.tokens_sampled += len(token_ids) - len(result.discarded)
        if self._proposer is not None:
            self._proposer.observe(batch, result)
        return result

    def _finish(self, sequence: Sequence, token_id: int, row: int, result: CommitResult) -> None:
        """End a sequence that may end with its newest token, if it does.

        An end token is no text, so the grammar does not get it.
        """
        request, reason = sequence.request, None
        if token_id in request.stop_ids:
            if sequence.num_answered > request.params.min_tokens:
                reason = FinishReason.STOP
        elif request.grammar is not None:
            try:
                request.grammar.accept(token_id)
                reason = FinishReason.STOP if request.grammar.finished else None
            except BaseException as error:  # the fault boundary of a grammar: others go on
                result.failed[row] = error
                self.queues.finish(sequence)
                return
        if reason is None and len(sequence.token_ids) >= sequence.max_known:
            reason = FinishReason.LENGTH
        if reason is not None:
            result.finished[row] = reason
            self.queues.finish(sequence)


def _without_preempted(
    decodes: DecodeBatch, segments: list[Segment]
) -> tuple[DecodeBatch, list[Segment]]:
    running = [sequence for sequence in decodes.sequences if sequence.slot >= 0]
    return DecodeBatch.of(running), [segment for segment in segments if segment.sequence.slot >= 0]
