"""Sources and controller as the one `Proposer` of an engine."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from ..engine.batch import Batch, CommitResult, Proposal, Sequence
from ..engine.scheduler import Proposer
from .controller import MeasuredStep, Outlook, Policy
from .estimates import Acceptance, Key
from .source import Source

log = logging.getLogger("mlxinfer.speculation")
LOOKED_AT = 2  # sequences of a step, as long as nothing is proposed


@dataclass(slots=True)
class SourceCounts:
    """What came of the proposals of one source."""

    num_drafts: int = 0  # proposals of one sequence in one step
    num_drafted: int = 0  # tokens
    num_accepted: int = 0
    num_switched_off: int = 0  # requests for which the source failed and proposes no more
    last_error: str | None = None  # why
    accepted_at: list[int] = field(default_factory=list)  # by position


@dataclass(slots=True)
class Plan:
    """What a source is to propose for a sequence."""

    source: Source
    keys: list[Key]  # of its proposals, by position
    draft_s: float = 0.0  # seconds for all proposals of the step


@dataclass(slots=True)
class ReadStep:
    """A steady decode step that was read."""

    read_s: float
    num_sequences: int
    num_proposals: int
    num_tokens: int
    draft_s: float  # for making its proposals
    depth: int  # the most proposals of one sequence that had a cost

    def measured(self, num_sequences: int) -> MeasuredStep:
        """This step as one of so many sequences that was not timed."""
        counts = self.num_proposals, self.num_tokens
        return MeasuredStep(num_sequences, *counts, None, self.draft_s, self.depth)


class Speculation(Proposer):
    """Proposes tokens from several sources, as many as a policy finds worth it.

    For each sequence the source counts that promises most. One that raises an error is switched off
    for the requests of that step, and the error is logged: no request fails for a proposal.

    Args:
        make_sources: the sources, given what takes the scores of free ones.
        policy: says how many.
        max_depth: proposals of one sequence, at most.
        method: what was asked for, for `stats`.
        clock: seconds.
    """

    def __init__(
        self,
        make_sources: Callable[[Callable[[Sequence, Key, bool], None]], Seq[Source]],
        policy: Policy,
        *,
        max_depth: int,
        method: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = list(make_sources(self._score))
        self._policy = policy
        self._max_depth = max_depth
        self._method = method
        self.taps = next((source.taps for source in self._sources if source.taps), ())
        self._clock = clock
        priors: dict[Key, float] = {}
        for source in self._sources:
            priors |= source.priors
        self._acceptance = Acceptance(priors)
        self._counts = {source.name: SourceCounts() for source in self._sources}
        self._off: dict[Sequence, set[str]] = {}  # sources that failed for a sequence
        self._planned: dict[Sequence, Plan] = {}  # of the steps in flight
        self._known: set[Sequence] = set()
        self._turn: deque[ReadStep] = deque()  # the last steps, in which each sequence was once
        self._begun_s: float | None = None  # when the step before these was read
        self._num_plain = 0  # steps that were read since one was foreseen to have proposals
        self._num_decoding = 0  # in the step that is planned, and in those beside it
        self._draft_s = 0.0
        self._hopeful: set[Sequence] = set()  # of steps in which one was worth it
        self._next_look = 0

    # -- the engine's Proposer ------------------------------------------------------------------

    def depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """The most proposals that any sequence is to have, as far as it can be foreseen.

        As long as nothing is worth it, a step looks at a few sequences in turn, and at none where
        the policy wants no proposals whatever they are: a large batch pays next to nothing.
        """
        self._num_decoding = num_decoding
        self._known.update(sequences)
        if not sequences or not self._policy.is_open(num_decoding):
            self._hopeful.difference_update(sequences)
            return 0
        for source in self._sources:
            source.begin_step()
        few = sequences if self._hopeful.intersection(sequences) else self._next_few(sequences)
        depth = self._foreseen(few, len(sequences))
        if depth and few is not sequences:
            depth = self._foreseen(sequences, len(sequences))
        if depth:
            self._hopeful.update(sequences)
            self._num_plain = 0
        else:
            self._hopeful.difference_update(sequences)
        return depth

    def _next_few(self, sequences: Seq[Sequence]) -> Seq[Sequence]:
        """Some of the sequences, others each time."""
        if len(sequences) <= LOOKED_AT:
            return sequences
        first = self._next_look % len(sequences)
        self._next_look = first + LOOKED_AT
        return sequences[first : first + LOOKED_AT]

    def _foreseen(self, sequences: Seq[Sequence], num_sequences: int) -> int:
        """The most proposals that one of these, of so many in the step, is to have."""
        plans = self._plans([s for s in sequences if self._may_have(s)])
        return max(self._choose(plans, num_sequences), default=0) if plans else 0

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        """Proposals of each sequence from its most promising source."""
        rows = [s for s in sequences if self._may_have(s)]
        plans = self._plans(rows)
        if not plans:
            return [Proposal(())] * len(sequences)
        self._draft_s = 0.0
        depths = dict(zip(plans, self._choose(plans, len(sequences)), strict=True))
        found: dict[Sequence, Proposal] = {}
        for source in self._sources:
            some = [s for s, plan in plans.items() if plan.source is source and depths[s]]
            if some:
                found |= self._ask(source, some, [min(depths[s], depth) for s in some])
        for sequence in found:
            plans[sequence].draft_s = self._draft_s
            self._planned[sequence] = plans[sequence]
        return [found.get(s, Proposal(())) for s in sequences]

    def take(self, batch: Batch, hidden: Any) -> None:
        """Hand hidden states on to the sources that read them."""
        for source in self._sources:
            off = [source.name in self._off.get(s, ()) for s in batch.sequences]
            if not source.taps or all(off):
                continue
            try:
                source.take(batch, hidden)
            except Exception:  # the fault boundary of a source, as in `_ask`
                self._switch_off(source, batch.sequences)

    def observe(self, batch: Batch, result: CommitResult) -> None:
        """Score the proposals of a step, and let the policy know what the step took."""
        accepted = self._score_planned(batch, result)
        self._measure(batch, result, sum(len(s.proposals) for s in batch.short), accepted)
        for sequence in batch.sampling.sequences:
            self._planned.pop(sequence, None)
            if sequence.finished and sequence in self._known:
                self._end(sequence)
        if batch.admitted:  # then what was aborted is swept out, too
            for sequence in [s for s in self._known if s.finished]:
                self._end(sequence)

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what was proposed and accepted, in all and by source."""
        sources = {
            source.name: {
                "drafts": counts.num_drafts,
                "drafted": counts.num_drafted,
                "accepted": counts.num_accepted,
                "switched_off": counts.num_switched_off,
                "last_error": counts.last_error,
                "accepted_at": list(counts.accepted_at),
                **source.stats(),
            }
            for source in self._sources
            for counts in [self._counts[source.name]]
        }
        positions = [counts.accepted_at for counts in self._counts.values()]
        return {
            "method": self._method,
            "max_draft": self._max_depth,
            **{name: sum(s[name] for s in sources.values()) for name in _TOTALS},
            "accepted_at": [
                sum(some[i] for some in positions if i < len(some)) for i in range(self._max_depth)
            ],
            "chances": {f"{name} {n}": c for (name, n), c in self._acceptance.measured().items()},
            "sources": sources,
        }

    # -- what to propose ------------------------------------------------------------------------

    def _may_have(self, sequence: Sequence) -> bool:
        """Whether it decodes, and its request wants proposals."""
        return sequence.request.params.speculate and sequence.num_computed >= sequence.num_prompt

    def _plans(self, sequences: Seq[Sequence]) -> dict[Sequence, Plan]:
        """The most promising source of each sequence that has any."""
        plans = {s: self._plan(s) for s in sequences}
        return {s: plan for s, plan in plans.items() if plan is not None}

    def _plan(self, sequence: Sequence) -> Plan | None:
        best, best_tokens = None, 0.0
        off = self._off.get(sequence, ())
        for source in self._sources:
            keys = [] if source.name in off else self._outlook(source, sequence)
            tokens, chance = 0.0, 1.0
            for key in keys:
                chance *= self._acceptance.chance(sequence, key)
                tokens += chance
            if tokens > best_tokens:
                best, best_tokens = Plan(source, keys), tokens
        return best

    def _outlook(self, source: Source, sequence: Sequence) -> list[Key]:
        """What a source could propose; nothing where it fails."""
        try:
            return source.outlook(sequence, self._max_depth)
        except Exception:  # the fault boundary of a source, as in `_ask`
            self._switch_off(source, [sequence])
            return []

    def _choose(self, plans: dict[Sequence, Plan], num_sequences: int) -> list[int]:
        chance = self._acceptance.chance
        outlooks = [
            Outlook([chance(s, key) for key in plan.keys], plan.source.cost)
            for s, plan in plans.items()
        ]
        num_decoding = max(self._num_decoding, num_sequences)
        return self._policy.choose(outlooks, num_decoding, num_sequences / num_decoding)

    def _ask(
        self, source: Source, sequences: list[Sequence], depths: list[int]
    ) -> dict[Sequence, Proposal]:
        """What a source proposes; nothing where it fails."""
        began_s = self._clock()
        try:
            proposed = source.propose(sequences, depths)
        except Exception:  # the fault boundary of a source: the requests go on without it
            self._switch_off(source, sequences)
            return {}
        if source.cost:
            self._draft_s += self._clock() - began_s
        return {s: found for s, found in zip(sequences, proposed, strict=True) if found.token_ids}

    def _switch_off(self, source: Source, sequences: list[Sequence]) -> None:
        names = ", ".join(sequence.request.id for sequence in sequences)
        log.exception("no more proposals by %s for the requests %s", source.name, names)
        error, counts = sys.exception(), self._counts[source.name]
        counts.num_switched_off += len(sequences)
        counts.last_error = f"{type(error).__name__}: {error}"
        for sequence in sequences:
            self._off.setdefault(sequence, set()).add(source.name)

    # -- what came of it ------------------------------------------------------------------------

    def _score_planned(self, batch: Batch, result: CommitResult) -> dict[Sequence, int]:
        """Count accepted proposals by sequence, and score those of costly sources."""
        sampling, gone = batch.sampling, set(result.discarded)
        accepted = {s.sequence: 0 for s in batch.short if s.proposals}
        if sampling.proposals is None:
            return accepted
        for row, count in enumerate(sampling.proposals.counts.tolist()):
            if count and row not in gone:
                accepted[sampling.sequences[row]] += 1
        for segment in batch.short:
            plan = self._planned.get(segment.sequence) if segment.proposals else None
            if plan is not None:
                self._score_plan(segment.sequence, plan, len(segment.proposals), accepted)
        return accepted

    def _score_plan(
        self, sequence: Sequence, plan: Plan, num_drafted: int, accepted: dict[Sequence, int]
    ) -> None:
        held, counts = accepted[sequence], self._counts[plan.source.name]
        counts.num_drafts += 1
        counts.num_drafted += num_drafted
        counts.num_accepted += held
        counts.accepted_at += [0] * (num_drafted - len(counts.accepted_at))
        for place in range(held):
            counts.accepted_at[place] += 1
        if plan.source.is_free:  # it scores its own guesses
            return
        tried = held if sequence.finished else min(held + 1, num_drafted)
        for place in range(tried):
            self._score(sequence, plan.keys[place], place < held)

    def _score(self, sequence: Sequence, key: Key, held: bool) -> None:
        self._acceptance.observe(sequence, key, held)

    def _measure(
        self, batch: Batch, result: CommitResult, num_proposals: int, accepted: dict[Sequence, int]
    ) -> None:
        """Let the policy know how long steady decode steps took, and what they gave.

        Steps that take turns count together, until each sequence was in one of them.
        """
        planned = {s: self._planned[s] for s in accepted if s in self._planned}
        costly = {s for s, plan in planned.items() if plan.source.cost}
        step = ReadStep(
            self._clock(),
            len(batch.sampling) - num_proposals,
            num_proposals,
            len(batch.sampling) - len(result.discarded),
            max([plan.draft_s for plan in planned.values()], default=0.0),
            max([len(s.proposals) for s in batch.short if s.sequence in costly], default=0),
        )
        steady = bool(batch.num_tokens) and not batch.long and not batch.begins_answers
        if not steady:
            self._turn.clear()
            self._begun_s = None
        if step.num_sequences:
            num_decoding = max(batch.num_decoding, step.num_sequences)
            measured = self._turn_with(step, num_decoding) if steady else None
            if self._policy.observe(measured or step.measured(num_decoding)):
                for source in [source for source in self._sources if not source.is_free]:
                    self._acceptance.renew(source.name)
        self._num_plain = self._num_plain + 1 if steady and not num_proposals else 0

    def _turn_with(self, step: ReadStep, num_decoding: int) -> MeasuredStep | None:
        """The last steps as one of all sequences; None: not all are timed, or were alike."""
        turn = self._turn
        turn.append(step)
        while sum([s.num_sequences for s in turn]) - turn[0].num_sequences >= num_decoding:
            self._begun_s = turn.popleft().read_s
        num_sequences = sum([s.num_sequences for s in turn])
        num_proposals = sum([s.num_proposals for s in turn])
        is_plain = self._num_plain >= len(turn)
        if self._begun_s is None or num_sequences < num_decoding or not (num_proposals or is_plain):
            return None
        return MeasuredStep(
            num_sequences,
            num_proposals,
            sum([s.num_tokens for s in turn]),
            step.read_s - self._begun_s,
            sum([s.draft_s for s in turn]),
            max([s.depth for s in turn]),
        )

    def _end(self, sequence: Sequence) -> None:
        """Drop the state of a sequence in all sources."""
        self._known.discard(sequence)
        self._off.pop(sequence, None)
        self._planned.pop(sequence, None)
        self._acceptance.forget(sequence)
        for source in self._sources:
            source.end(sequence)


_TOTALS = ("drafts", "drafted", "accepted", "switched_off")
