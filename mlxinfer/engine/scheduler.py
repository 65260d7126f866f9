"""What each step computes. Pure Python: knows no arrays of MLX.

Which requests wait and run: `queues.py`.

A step has one token of every sequence that decodes, then chunks of prompts. `PrefillSizer` says
how many prompt tokens.

With pipeline stages, each step takes a micro-batch: rows that are not part of a step in flight.
While later stages work on it, this rank begins the next step, with other rows. So the tokens of a
row are known when its next step is planned, and accepted proposals of one step do not change
another step in flight. Source: GPipe, arXiv:1811.06965.

A step may be in flight while the next one is planned. Pages that are given up meanwhile are safe:
a step that writes pages waits for the step in flight (`Batch.writes_pages`).
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from math import inf

import numpy as np

from ..cache.inputs import Move
from ..core import FinishReason
from ..fair import Tenant
from .batch import MAX_SHORT, Batch, CommitResult, DecodeBatch, Segment, Sequence
from .grammar_masks import num_allowed
from .kv_manager import KVManager
from .prefill import PrefillSizer
from .proposals import Proposal, Proposer, accepted_rows
from .queues import NO_FEATURES, EngineCounters, FeatureSource, RequestQueues
from .rows import DecodeRows

RECENT_S = 10.0  # of steps after tenants shared one: a tenant that comes back finds no longer steps


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        prefill_chunk: prompt tokens a step at most, all sequences together.
        prefill_slice_s, prefill_fixed: see `PrefillSizer`.
        proposer: of tokens to verify; None: a step computes one token of each answer.
        counters: of an earlier scheduler; the counts go on.
        num_stages: steps that may be in flight at once, each with other rows; 1: a step has all.
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
        self._shared = False  # whether tenants share steps, or did a moment ago
        self._newest: Seq[Sequence] = ()  # that the last step samples for
        self._steady: list[DecodeBatch] = []  # the last of each group of rows, to go on from

    def reads_first(self, batch: Batch) -> bool:
        """Whether the step in flight is read before the next is planned.

        Proposals need the last token, so the step in flight is read first. The number of accepted
        proposals decides where the next step starts, and the time of a step with prompts decides
        how many prompt tokens the next one gets. A caller waits for the first token of an answer.
        Where tenants share, a request that comes would wait for both steps, if they are long.
        With pipeline stages the next step has other rows, unless one sequence runs alone.
        """
        running = self.queues.running
        if self._num_stages > 1 and len(running) > 1:
            return False
        if self._num_stages == 1 and (batch.ragged or (self._shared and self.prefill.is_long)):
            return True
        proposer = self._proposer if self._most_proposals else None
        return proposer is not None and proposer.choose_depth(running, len(running)) > 0

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
        # They hold old tables or slots: a page was replaced, or sequences were admitted when there
        # was nothing to compute.
        if replaced or queues.admitted:
            self._steady = []
        if queues.contested:
            self.prefill.uncontested_s = 0.0
        self._shared = self.prefill.uncontested_s < RECENT_S
        at_first = self.counters.preemptions
        decodes, verified, num_decoding = self._next_decodes()
        preemptions = self.counters.preemptions
        prefills = self._next_prefills(decodes, verified)
        if self.counters.preemptions > preemptions:
            decodes, verified = _without_preempted(decodes, verified)
        segments = verified + prefills
        if not segments and not decodes.sequences:
            preempted = self.counters.preemptions > at_first  # perhaps there is room now
            pending = any(s.num_pending for s in queues.unfinished())
            assert queues.idle or pending or preempted or self._features.wanted, "stuck"
            return None
        long = [s for s in segments if s.is_chunk] if segments else []
        short = [s for s in segments if not s.is_chunk] if segments else []
        short.sort(key=lambda s: s.num_tokens > 1)
        work, admitted = self.kv_manager.take_work(), queues.admitted
        queues.admitted = []
        batch = Batch(decodes, short, long, work, admitted, num_decoding=num_decoding)
        self._seal_tails(batch)
        self._mark_launched(batch)
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
        elif self._shared and self._rows is not None:
            decoding, num_decoding = self._shared_rows(self._rows, decoding)
        proposals = self._propose(decoding, num_decoding)
        singles = [s for s in decoding if s not in proposals] if proposals else decoding
        decodes = None
        for before in self._steady:
            if before.sequences == singles:
                decodes = before.advance()
        decodes = decodes or DecodeBatch.of(singles)
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

    def _shared_rows(
        self, rows: DecodeRows, decoding: list[Sequence]
    ) -> tuple[list[Sequence], int]:
        """As `_micro_batch`, if tenants share the step: tokens come as often as shares say."""
        rows.times.note(self.prefill.decoded)
        prefilling, page_s = self._prompts_s(self._prompts()), self.prefill.page_s
        chosen = rows.choose(decoding, prefilling, self.queues.tenants, page_s)
        return chosen, len(decoding) if len(chosen) < len(decoding) else 0

    def _prompts_s(self, prefilling: Iterable[Sequence]) -> dict[Tenant, float]:
        token_s, seconds = self.prefill.page_s / self.page_size, dict[Tenant, float]()
        for sequence in prefilling:
            tenant = sequence.request.tenant
            seconds[tenant] = seconds.get(tenant, 0.0) + sequence.num_left * token_s
        return seconds

    def _prompts(self) -> list[Sequence]:
        """Prompts to compute of each tenant: those that run, or wait while none of it runs."""
        running = self.queues.running
        prompts = [s for s in running if s.num_computed < s.num_prompt]
        tenants = {s.request.tenant for s in running}
        waiting = [s for s in self.queues.waiting if s.fetch is None]
        return prompts + [s for s in waiting if s.request.tenant not in tenants]

    def tower_s(self, tenants: Collection[Tenant]) -> float:
        """Seconds that the tower may take before the next step, for pictures of these tenants.

        A slice beside answers of other tenants may be shorter than one beside answers of these.
        """
        queues = self.queues
        if self._rows is None or not queues.contested:
            return inf
        decoding = [sequence for sequence in queues.running if sequence.decodes]
        return self._rows.tower_s(decoding, dict.fromkeys(tenants, inf), queues.tenants)

    def _hold_decodes(self, decodes: DecodeBatch) -> None:
        """Take pages for new tokens that begin one; the youngest sequences may be preempted."""
        starts = decodes.segments.starts.tolist()
        for row in [row for row, start in enumerate(starts) if not start % self.page_size]:
            sequence = decodes.sequences[row]
            if sequence.slot >= 0:  # else it was just preempted
                self.queues.hold(sequence, starts[row] + 1)

    def _next_prefills(self, decodes: DecodeBatch, verified: list[Segment]) -> list[Segment]:
        queues = self.queues
        all_decode = len(decodes.sequences) + len(verified) == len(queues.running)
        if all_decode and not queues.waiting:
            return []
        behind = [s for s in queues.running if not all_decode and s.num_left > 0]
        prefilling = [s for s in behind if not (s.num_pending or s.decodes)]
        max_prefilling = self.prefill.fixed // self.page_size  # each gets a page at least
        preemptions = self.counters.preemptions
        while admitted := queues.admit(
            prefilling, max_prefilling, again=self.counters.preemptions == preemptions
        ):
            prefilling = [*(s for s in prefilling if s.slot >= 0), admitted]
        prefilling = [s for s in prefilling if s.slot >= 0]  # those that were not preempted for it
        shares: list[tuple[Sequence, int]] = []
        room = self.prefill.most
        # A prompt that waits for a picture gets no share: perhaps another one has to go on first.
        ready = [s for s in prefilling if s.pictures is None or self._features.available(s, 1)]
        num_waiting = len(prefilling) - len(ready)
        prompt_room = None
        if ready and self._shared and self._rows is not None:
            rows = decodes.sequences + [s.sequence for s in verified for _ in range(s.num_tokens)]
            tower_s = self._features.worked_s
            prompt_room = self._rows.room_for_prompts(
                rows, self._prompts_s(ready), queues.tenants, tower_s
            )
            if prompt_room is None:
                return []
        num_running = len(queues.running) - num_waiting
        for sequence, share in self.prefill.shares(ready, num_running, prompt_room):
            if sequence.slot < 0:
                continue
            count = self._chunk(sequence, share)
            if 0 < count <= room and queues.hold(sequence, sequence.num_computed + count):
                shares.append((sequence, count))
                room -= count
        return [
            # A part that does not end the prompt goes to pages, where the next one reads it.
            Segment.following(s, count, is_chunk=count < s.num_left or count > self._max_short)
            for s, count in shares
            if s.slot >= 0
        ]

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

    # -- proposals ------------------------------------------------------------------------------

    @property
    def _most_proposals(self) -> int:
        """Of each sequence in a step; where tenants share it, as many as fit beside its rows."""
        most = self._max_short - 1
        return min(most, self._rows.depth) if self._shared and self._rows is not None else most

    def _propose(self, decoding: list[Sequence], num_decoding: int) -> dict[Sequence, Proposal]:
        """Proposals to verify, by sequence. Sequences with unread tokens get none, nor
        do those that gave NaN.

        Proposals are cut at the full length of the answer, and where a grammar forbids one.
        `num_decoding`: see `_next_decodes`.
        """
        proposer = self._proposer
        most = self._most_proposals
        if proposer is None or not most:
            return {}
        known = [s for s in decoding if not (s.num_pending or s.alone)]
        depth = min(proposer.choose_depth(known, num_decoding or len(known)), most)
        if depth <= 0:
            return {}
        proposals: dict[Sequence, Proposal] = {}
        for sequence, proposed in zip(known, proposer.propose(known, depth), strict=True):
            usable = proposed.cut(min(depth, sequence.max_known - len(sequence.token_ids) - 1))
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
        segment = Segment.following(sequence, 1, is_chunk=False)
        segment.proposals, segment.weights = proposal
        segment.num_tokens = segment.num_samples = 1 + len(proposal.token_ids)
        return segment

    def _seal_tails(self, batch: Batch) -> None:
        """Add the full pages of all tails to a step that has a barrier anyway, or needs one now.

        A tail is a ring of two pages. A barrier costs the same for one tail as for all.
        """
        longest = max([s.stop - s.sealed for s in batch.short], default=0) if batch.short else 0
        if max(longest, batch.decodes.max_tail) <= 2 * self.page_size and not batch.writes_pages:
            return
        highest = max([sequence.slot for sequence in self.queues.running])
        batch.held_slots = max(highest + 1, batch.cache_work.num_slots)
        segments, sequences = batch.decodes.segments, batch.decodes.sequences
        stops = np.maximum(segments.starts - segments.starts % self.page_size, segments.sealed)
        for row in np.flatnonzero(stops > segments.sealed).tolist():
            batch.cache_work.seal.append(self._seal(sequences[row], int(stops[row])))
        batch.decodes = batch.decodes.sealed_to(stops)
        for segment in batch.short + batch.long:
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

    def _mark_launched(self, batch: Batch) -> None:
        batch.advance_sequences(self.page_size)
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
        if self._shared:
            self.queues.charge(batch)
        self._note_steady(batch)
        self._newest = batch.sampling.sequences
        self.counters.steps += 1
        self.counters.tokens_computed += batch.num_tokens

    def _note_steady(self, batch: Batch) -> None:
        if batch.admitted or self._num_stages == 1:  # maybe again, in another slot; or all rows are
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
        holds = None
        if proposals is not None:
            holds = accepted_rows(proposals, token_ids)
            verified = [segment for segment in batch.short if segment.proposals]
            result.num_accepted = {segment.sequence: 0 for segment in verified}
            result.num_kept = {segment.slot: 1 for segment in verified}
        rows = zip(sampling.sequences, token_ids, strict=True)
        for row, (sequence, token_id) in enumerate(rows):
            sequence.num_pending -= 1
            if sequence.slot < 0:
                result.released.append(row)
            if sequence.finished or (holds is not None and not holds[row]):
                result.discarded.append(row)
                continue
            sequence.token_ids.append(token_id)
            if proposals is not None and proposals.counts[row]:
                self.counters.tokens_accepted += 1
                sequence.request.num_accepted += 1
                result.num_accepted[sequence] += 1  # the proposal before it held
                if sequence.slot >= 0:
                    sequence.num_computed += 1
                    result.num_kept[sequence.slot] += 1
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
